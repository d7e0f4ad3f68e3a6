"""The benchmark monitor: the cost of `ebpfproxy monitor` for a new connection, unused and in use."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ebpf.inspect import events
from ebpfproxy.bench import workload
from ebpfproxy.bench.load import Load, one_cpu
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, rotated
from ebpfproxy.lab import Lab
from ebpfproxy.linux.child import python

OTHER, UNUSED, LIMITED, UNLIMITED = "other", "unused", "rate-1000", "rate-0"
"""The rows: the programs of another checkout; nothing reads events; a reader with a rate of 1000 events per
second; one without a limit."""

_READERS = {LIMITED: "--rate=1000", UNLIMITED: "--rate=0"}
_FLAGS = ("--proxy-mode=ebpf", "--sync-period=1h")
_PATIENCE = 30.0


class Size(NamedTuple):
    """The extent of a run. `samples` is the number of connections for each row in all rounds together.
    `readers`: whether rows with a reader are measured. `rate`: connections per second; 0: without a pause."""

    services: int
    endpoints: int
    samples: int
    rounds: int
    readers: bool
    rate: float = 0.0


def run(size: Size, other: Path | None, progress: Progress) -> Iterator[Result]:
    """Measure connections from a pod, whose client connects again at once, or at the rate of `size`.

    The client and the server share a CPU. `other`: another checkout.
    Metrics: connect_us, and per_s, the connections per second of a turn. Raises EbpfProxyError.
    """
    names = [*([OTHER] if other else []), UNUSED, *(_READERS if size.readers else ())]
    samples = Samples(names, size.services)
    with contextlib.ExitStack() as labs:
        here = labs.enter_context(_side(2, size, None, progress))
        sides = dict.fromkeys(names, here)
        if other:
            sides[OTHER] = labs.enter_context(_side(1, size, other, progress))
        for turn in range(size.rounds):
            progress(f"round {turn + 1} of {size.rounds}")
            for name in rotated(names, turn):
                with sides[name].reader(_READERS.get(name)):
                    begin = time.monotonic()
                    figures = sides[name].measure(max(1, size.samples // size.rounds), turn)
                    samples.add(name, "clusterip", "connect_us", turn, figures)
                    rate = len(figures) / (time.monotonic() - begin)
                    samples.add(name, "clusterip", "per_s", turn, [rate])
    yield from samples.results()


@contextlib.contextmanager
def _side(number: int, size: Size, checkout: Path | None, progress: Progress) -> Iterator["_Side"]:
    """A node with an agent, from this source or another checkout."""
    with Lab(f"bench-monitor-{number}", number) as lab:
        side = _Side(lab, size)
        before = ("env", "-C", str(checkout), f"PYTHONPATH={checkout}") if checkout else ()
        progress(f"starting an agent{f' of {checkout}' if checkout else ''}")
        lab.nodes[0].agent(lab.folder / "manifests", *_FLAGS, wait=600, before=before)
        yield side


class _Side:
    """A server, and a client in a pod."""

    def __init__(self, lab: Lab, size: Size) -> None:
        self._load = Load(lab.folder, one_cpu())
        self._rate = size.rate
        self._bpffs = lab.bpffs
        workload.write(lab.folder / "manifests", size.services, size.endpoints)
        workload.server_pod(lab, self._load)
        self._targets = self._load.targets("clusterip", workload.service_targets(size.services))
        self._client = lab.pod("client")

    def measure(self, count: int, seed: int) -> Sequence[float]:
        """Return microseconds."""
        (figures,) = self._load.measure(
            self._client, "connect", self._targets, count, seed=seed, rate=self._rate
        )
        return [each / 1000 for each in figures]

    @contextlib.contextmanager
    def reader(self, rate: str | None) -> Iterator[None]:
        """Run `ebpfproxy monitor` with this flag in the block. None: nothing reads events."""
        if rate is None:
            yield
            return
        command = python("-m", "ebpfproxy", "monitor", f"--bpffs-root={self._bpffs}", rate)
        with open(os.devnull, "w") as output, subprocess.Popen(command, stdout=output) as process:
            try:
                end = time.monotonic() + _PATIENCE
                while not events.are_recorded(self._bpffs) and time.monotonic() < end:
                    time.sleep(0.01)
                yield
            finally:
                process.terminate()
