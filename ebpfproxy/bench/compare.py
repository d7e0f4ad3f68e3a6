"""The comparison: every case in every mode, for several numbers of Services, in turns.

Traffic is measured with the labs of all modes side by side, in rotating order, so that figures of the same
turn are comparable. Starts, changes and memory are measured in a new lab each time, because a start on a node
that has rules already is another case.
"""

import contextlib
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ebpf.programs import object_file
from ebpfproxy.bench import kube_proxy, modes, workload
from ebpfproxy.bench.changes import SPACING, change_all
from ebpfproxy.bench.compare_cases import CHANGE, MEMORY, OF_STARTS, STARTUP, TRAFFIC, Size, Testbed
from ebpfproxy.bench.machine import Observed
from ebpfproxy.bench.modes import NONE
from ebpfproxy.bench.proxies import Proxy, await_service, start_proxy
from ebpfproxy.bench.results import Collector, Comparison, Figure, LeftOut, Method
from ebpfproxy.bench.sides import PATIENCE, Progress, part_of, rotated, turns
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Lab


def run(method: Method, progress: Progress, kube_proxy_path: Path | None = None) -> Comparison:
    """Measure. `method.modes` may have modes of kube-proxy if there is `kube_proxy_path`.

    Mode none is measured first in addition. Raises EbpfProxyError.
    """
    workload.require_node_ports(max(method.services))
    versions = _kube_proxy_version(method, kube_proxy_path)
    if modes.EBPF in map(modes.base, method.modes):
        object_file()  # as in the image: no agent compiles
    observed, found = Observed(), _Found([], [])
    method = _with_none(method)
    for index, services in enumerate(method.services):
        with contextlib.ExitStack() as labs:
            one = _Run(method, services, kube_proxy_path, labs)
            part = _about(services, part_of(progress, index, len(method.services)))
            _measure_starts(one, part_of(part, 0, 2))
            _measure_traffic(one, part_of(part, 1, 2))
        found.figures.extend(one.collector.figures())
        found.left_out.extend(LeftOut(mode, services) for mode in method.modes if mode in one.slow)
    return Comparison(observed.end(versions), method, tuple(found.figures), tuple(found.left_out))


def _kube_proxy_version(method: Method, path: Path | None) -> list[tuple[str, str]]:
    if not any(mode.startswith(kube_proxy.PREFIX) for mode in method.modes):
        return []
    if path is None:
        raise ConfigError(
            "--modes: kube-proxy is not part of ebpfproxy", "give its binary: --kube-proxy=PATH"
        )
    return [("kube-proxy", kube_proxy.version(path))]


def _with_none(method: Method) -> Method:
    """Return the method with mode none first."""
    names = (NONE, *(mode for mode in method.modes if mode != NONE))
    return Method(**{field: getattr(method, field) for field in method.__struct_fields__} | {"modes": names})


class _Found(NamedTuple):
    """The results so far."""

    figures: list[Figure]
    left_out: list[LeftOut]


class _Side(NamedTuple):
    lab: Lab
    testbed: Testbed
    proxy: Proxy | None


class _Run:
    """The measurements with one number of Services."""

    def __init__(
        self, method: Method, services: int, binary: Path | None, labs: contextlib.ExitStack
    ) -> None:
        """`labs` keeps the labs for traffic."""
        self.method = method
        self.services = services
        self.size = Size(services, method.endpoints, method.seconds, method.cpu)
        self.collector = Collector(services, method.modes)
        self._binary = binary
        self._sides: dict[str, _Side] = {}
        self.slow: set[str] = set()
        """Modes whose start took longer than the limit. They are left out from then on."""
        self._labs = labs

    def start(self, mode: str, turn: int) -> None:
        """Start a proxy on a new node, change a Service, and read the memory."""
        cases = self.method.cases
        if mode in self.slow:
            return
        with Lab(f"bench-{mode}", 1) as lab:
            testbed, proxy, seconds = self._started(lab, mode)
            if proxy is None:
                return
            if STARTUP in cases:
                self.collector.add(STARTUP, OF_STARTS[STARTUP], mode, turn, [seconds])
            if CHANGE in cases:
                assert testbed.source
                write, changes, limit = testbed.source.writer, self.method.changes, self.method.limit
                durations = testbed.client.call(
                    # A proxy may answer before its first sync has ended, and syncs a change after that:
                    # kube-proxy 1.30 writes the rules, then deletes conntrack entries of UDP Services.
                    lambda: change_all(testbed.changing, write(), changes, SPACING, limit, warm_up=1),
                    timeout=PATIENCE,
                )
                self.collector.add(CHANGE, OF_STARTS[CHANGE], mode, turn, durations)
            if MEMORY in cases:
                self.collector.add(MEMORY, OF_STARTS[MEMORY], mode, turn, [proxy.rss_mb()])
            proxy.check()

    def open(self, mode: str, number: int) -> None:
        """Create the lab of a mode for traffic, which stays until the end of the run."""
        if mode in self.slow:
            return
        with contextlib.ExitStack() as created:
            lab = created.enter_context(Lab(f"bench-{mode}", number))
            testbed, proxy, _ = self._started(lab, mode)
            if mode in self.slow:
                return
            self._labs.push(created.pop_all())
        self._sides[mode] = _Side(lab, testbed, proxy)

    def measure(self, case: str, mode: str, turn: int) -> None:
        metric, measure, divisor = TRAFFIC[case]
        side = self._sides.get(mode)
        if side is None:
            return
        samples = measure(side.testbed, turn)
        if side.proxy:
            side.proxy.check()
        self.collector.add(case, metric, mode, turn, (each / divisor for each in samples))

    def _started(self, lab: Lab, mode: str) -> tuple[Testbed, Proxy | None, float]:
        """Return the testbed, the proxy, and the seconds until the last Service answered.

        There is no proxy in mode none, and after a start that took too long.
        """
        testbed = Testbed(lab, self.size, proxied=mode != NONE)
        if testbed.source is None:
            return testbed, None, 0.0
        proxy = start_proxy(lab, mode, testbed.source, self._binary)
        assert proxy
        service, limit = testbed.changing.service, self.method.limit
        seconds = await_service(testbed.client, proxy, service, limit)
        if seconds is None:
            self.slow.add(mode)
            return testbed, None, limit
        return testbed, proxy, seconds


def _about(services: int, progress: Progress) -> Progress:
    return lambda text, done=None, /: progress(f"{services} Services: {text}", done)


def _measure_starts(run: _Run, progress: Progress) -> None:
    method = run.method
    if not set(method.cases) & set(OF_STARTS):
        return
    proxies = [mode for mode in method.modes if mode != NONE]
    for turn in range(method.starts):
        for number, mode in enumerate(rotated(proxies, turn), turn * len(proxies)):
            done = number / len(proxies) / method.starts
            progress(f"start {turn + 1} of {method.starts}, {mode}", done)
            run.start(mode, turn)


def _measure_traffic(run: _Run, progress: Progress) -> None:
    method = run.method
    cases = [case for case in method.cases if case in TRAFFIC]
    if not cases:
        return
    for number, mode in enumerate(method.modes, 1):
        progress(f"preparing {mode}", 0.0)
        run.open(mode, number)
    for turn, case, mode in turns(method.modes, method.rounds, cases, progress):
        run.measure(case, mode, turn)
