"""A node whose mode is opened by one process after the other, and clients that connect all the time."""

import collections
import json
import random
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ebpfproxy.backends.interface import Mode
from ebpfproxy.bench.load import Load
from ebpfproxy.config import Config
from ebpfproxy.lab import Lab, Pod
from tests.faults.clusters import TARGET_PORT, Clusters, Exposed, frontends, node_of
from tests.faults.lives import Life, Plan
from tests.kernel.cluster import SERVICE_NETWORKS

_TIMEOUT = 120.0  # seconds of one life
_RATE_OF_FAULTS = 0.1  # the share of calls
_RATE = 20.0  # connections per second of each client


class FaultyNode:
    """Use it within a `with` block. `faults` and `kills` count what was injected, by point."""

    def __init__(
        self, lab: Lab, mode: Mode, texts: Mapping[str, Any], seed: str, pool: Sequence[Exposed]
    ) -> None:
        self._lab = lab
        self._mode = mode
        self._seed = seed
        self._pool = pool
        self._random = random.Random(seed)
        self._journal = lab.folder / "journal"
        self._lives = 0
        self._read = 0
        self.faults: collections.Counter[str] = collections.Counter()
        self.kills: collections.Counter[str] = collections.Counter()
        self.findings: list[dict[str, Any]] = []
        self.steps = 0
        self._reference = lab.folder / "reference"
        self._config = Config.parse(
            {
                "hostname_override": lab.node_name,
                "cgroup_root": str(lab.cgroup),
                "bpffs_root": str(lab.bpffs),
                "detect_local_mode": "InterfaceNamePrefix",
                "pod_interface_name_prefix": "veth",
                **texts,
            }
        )
        self._servers = [lab.pod(name) for name in "ab"]
        self._client = lab.pod("p")
        lab.ip(lab.outside, *(f"route add blackhole {network}" for network in SERVICE_NETWORKS))
        self._load = Load(lab.folder)
        for pod in self._servers:
            self._load.serve(pod, TARGET_PORT)
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def live(self, steps: int, rate: float, kill_at: int = 0) -> None:
        """Run one process to its end. It ends without a result if it was killed."""
        self._lives += 1
        plan = Plan(f"{self._seed}/{self._lives}", steps, rate, kill_at)
        call = self._lab.node.start(lambda: self._life(plan).run())
        try:
            call.result(_TIMEOUT)
        except ChildProcessError:
            self._account()
            assert kill_at, "the process ended without a kill"
        except TimeoutError as failure:
            self.findings.append({"where": f"life {plan}", "what": repr(failure)})
        self._account()

    def run(self, faults: int, kills: int, deadline: float) -> None:
        """Run processes until so many calls have failed and so many processes were killed, or until the
        monotonic time `deadline`. The last one runs without faults."""
        self.live(1, 0.0)
        if self._mode.name != "userspace":  # its relays end with their agent
            self.connect()
        while time.monotonic() < deadline:
            if self.kills.total() < kills:
                self.live(3, _RATE_OF_FAULTS, self.kill_soon())
            elif self.faults.total() < faults:
                self.live(20, _RATE_OF_FAULTS)
            else:
                break
        self.live(2, 0.0)

    def kill_soon(self) -> int:
        """Return a number of calls, as often from 1 to 10 as from 50 to 500."""
        return int(10 ** self._random.uniform(0, 2.7))

    def connect(self) -> None:
        """Start clients that connect through every path until `failed_connections`."""
        nodes = [self._lab.node.v4, self._lab.node.v6]
        for client in (self._client, self._lab.node, self._lab.outside):
            for name, target in frontends(nodes).items():
                if client is self._lab.outside and not name.startswith("node-port"):
                    continue
                called = f"{client.name}-{name}".replace(":", "-")
                targets = self._load.targets(called, [target])
                running = self._load.start_churn(client, targets, rate=_RATE)
                self._running.append((called, running))

    def end_connections(self) -> dict[str, dict[str, Any]]:
        """End the clients, and return their reports by name."""
        running, self._running = self._running, []
        return {name: self._load.end_churn(each) for name, each in running}

    def _life(self, plan: Plan) -> Life:
        node: Pod = self._lab.node
        addresses = [(each.v4, each.v6) for each in self._servers]

        def clusters() -> Clusters:
            here = node_of(self._lab.node_name, (node.v4, node.v6))
            return Clusters(self._pool, plan.seed, here, addresses)

        return Life(self._mode, self._config, plan, (self._journal, self._reference), clusters)

    def _account(self) -> None:
        """Count the new lines of the journal."""
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        for line in lines[self._read :]:
            found = json.loads(line)
            kind = found.pop("kind")
            if kind == "fault":
                self.faults[found["point"]] += 1
            elif kind == "kill":
                self.kills[found["point"]] += 1
            elif kind == "finding":
                self.findings.append({"life": self._lives, **found})
            else:
                self.steps += 1
        self._read = len(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _name, running in self._running:
            running.kill()


def summary(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each kind of finding, with its number."""
    kinds: collections.Counter[str] = collections.Counter()
    first: dict[str, Mapping[str, Any]] = {}
    for each in findings:
        kind = f"{each['where']}: {each['what'][:100]} {(each.get('trace') or [''])[-3:]}"
        kinds[kind] += 1
        first.setdefault(kind, each)
    return [f"{count} x {kind}\n    first: {first[kind]}" for kind, count in kinds.most_common()]
