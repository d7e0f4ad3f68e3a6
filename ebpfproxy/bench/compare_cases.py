"""The cases of a comparison, and the testbed of each mode.

A node has a pod with all endpoints, a client in a pod, and a client outside. Without a proxy, clients connect
to the same endpoints directly.

    client in a pod ── node ── pod with the endpoints        through ClusterIPs
    client outside ─── node ── pod with the endpoints        through NodePorts
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.changes import ChangingSlice
from ebpfproxy.bench.load import Load, Target, megabits
from ebpfproxy.bench.source import API, Source
from ebpfproxy.lab import Lab, Netns, manifests

SAMPLES_MAX = 20_000
"""Samples of one turn at most, so that a run needs little memory."""

STREAM_MEGABYTES = 256

_EACH = 10
"""Each tenth Service has a NodePort and a UDP port, the first one included."""

_TCP, _UDP = "tcp", "udp"


class Size(NamedTuple):
    """`services` with `endpoints` endpoints each. A turn takes `seconds`. Clients and servers share `cpu`."""

    services: int
    endpoints: int
    seconds: float
    cpu: int | None


class Testbed:
    """The pods, targets and objects of one mode. `proxied` is False in mode none."""

    def __init__(self, lab: Lab, size: Size, *, proxied: bool) -> None:
        self._load = Load(lab.folder, size.cpu)
        self._size = size
        self._proxied = proxied
        workload.server_pod(lab, self._load)
        self.client, self.outside = lab.pod("client"), lab.outside
        self._node = lab.node.v4
        self.changing = ChangingSlice(size.services, size.services * size.endpoints)
        folder = lab.folder / "manifests"
        folder.mkdir()
        manifests.write(folder / "services.json", manifests.listed(services(size.services)))
        manifests.write(folder / "slices.json", manifests.listed(slices(size.services, size.endpoints)))
        self.changing.write(folder)
        self.source = Source(API, lab, folder) if proxied else None

    def measure(self, client: Netns, mode: str, targets: Iterable[Target], turn: int) -> list[float]:
        """Return nanoseconds, measured by the load generator in its `mode`."""
        file = self._load.targets("compare", targets)
        (durations,) = self._load.measure(
            client, mode, file, SAMPLES_MAX, seconds=self._size.seconds, seed=turn, connected=True
        )
        return list(durations)

    def cluster_ips(self, which: Sequence[int]) -> Iterator[Target]:
        """Return the ClusterIPs of these Services; in mode none their endpoints."""
        if not self._proxied:
            return self._endpoints(which)
        return ((workload.cluster_ip(index), workload.PORT) for index in which)

    def node_ports(self, which: Sequence[int]) -> Iterator[Target]:
        """Return the NodePorts of these Services; in mode none their endpoints."""
        if not self._proxied:
            return self._endpoints(which)
        return ((self._node, workload.node_port(index)) for index in which)

    def stream(self, turn: int) -> list[float]:
        """Return Mbit/s of one stream from the client in the pod."""
        file = self._load.targets("compare", self.cluster_ips(self.all()))
        ((took,),) = self._load.measure(self.client, "put", file, 1, seed=turn, megabytes=STREAM_MEGABYTES)
        return [megabits(STREAM_MEGABYTES, took)]

    def all(self) -> range:
        return range(self._size.services)

    def exposed(self) -> range:
        """The Services with a NodePort and a UDP port."""
        return range(0, self._size.services, _EACH)

    def _endpoints(self, which: Sequence[int]) -> Iterator[Target]:
        for index in which:
            for address in workload.addresses_of(index, self._size.endpoints):
                yield address, workload.ENDPOINT_PORT


def services(count: int) -> Iterator[manifests.Object]:
    """Yield the Services. Each has a TCP port; each tenth also a UDP port, and NodePorts for both."""
    for index in range(count):
        protocols = ((_TCP, "TCP"), (_UDP, "UDP")) if index % _EACH == 0 else ((_TCP, "TCP"),)
        ports = [
            manifests.port(
                workload.PORT,
                name=name,
                protocol=protocol,
                target=workload.ENDPOINT_PORT,
                node_port=workload.node_port(index) if index % _EACH == 0 else 0,
            )
            for name, protocol in protocols
        ]
        yield manifests.service(f"service-{index}", [workload.cluster_ip(index)], ports)


def slices(count: int, endpoints: int) -> Iterator[manifests.Object]:
    """Yield the slice of each Service. All endpoints are on another node, as most of a large cluster."""
    ports = [
        manifests.port(workload.ENDPOINT_PORT, name=name, protocol=protocol)
        for name, protocol in ((_TCP, "TCP"), (_UDP, "UDP"))
    ]
    for index in range(count):
        entries = [
            manifests.endpoint(address, node="elsewhere")
            for address in workload.addresses_of(index, endpoints)
        ]
        yield manifests.endpoint_slice(f"service-{index}-slice", f"service-{index}", entries, ports)


class Case(NamedTuple):
    """A case with traffic. `measure` returns samples, which are divided by `divisor` to have the unit of the
    metric's name."""

    metric: str
    measure: Callable[[Testbed, int], list[float]]
    divisor: float = 1.0


TRAFFIC = {
    "connect": Case(
        "connect_us", lambda at, turn: at.measure(at.client, "connect", at.cluster_ips(at.all()), turn), 1e3
    ),
    "request": Case(
        "request_us", lambda at, turn: at.measure(at.client, "rr", at.cluster_ips(at.all()), turn), 1e3
    ),
    "udp": Case(
        "udp_us", lambda at, turn: at.measure(at.client, "udprr", at.cluster_ips(at.exposed()), turn), 1e3
    ),
    "dns": Case(
        "dns_us", lambda at, turn: at.measure(at.client, "udp", at.cluster_ips(at.exposed()), turn), 1e3
    ),
    "throughput": Case("throughput_mbit_s", lambda at, turn: at.stream(turn)),
    "nodeport": Case(
        "nodeport_us", lambda at, turn: at.measure(at.outside, "crr", at.node_ports(at.exposed()), turn), 1e3
    ),
    "packet": Case(
        "packet_ns", lambda at, turn: at.measure(at.outside, "packet", at.node_ports(at.exposed()), turn)
    ),
}
"""Cases with traffic, by name. The load generator describes its modes (c/load.c)."""

STARTUP, CHANGE, MEMORY = "startup", "change", "memory"
OF_STARTS = {STARTUP: "startup_s", CHANGE: "change_ms", MEMORY: "memory_mb"}
"""Cases that need a new node each time: their metrics by case."""

NAMES = (*TRAFFIC, *OF_STARTS)
