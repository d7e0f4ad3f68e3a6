"""Two nodes, an outside client, and Services with endpoints on the first or on the second node.

Each node has a second link to the router, without the agent's programs. On it the same client reaches the
same two pods at other addresses, with as many hops and without a proxy. Paths over it are called direct.

    client outside -- router == node -- pod "local"      the client connects to this node
                                     -- pod "inside"     a client that uses no Service
                             == node-2 -- pod "remote"   this node has the other endpoints

Only the destination of a packet determines its link, so that routing costs the same on both.
"""

import ipaddress
import math
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.api import fields
from ebpfproxy.bench import modes, workload
from ebpfproxy.bench.load import Load, Target
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Lab, Node, manifests
from ebpfproxy.linux.netns import netns

LOCAL, REMOTE = "local", "remote"
STRAIGHT = "direct-straight"
"""The path to the second node's pod without the first node: one hop less than other paths to this pod."""


_SERVED = {LOCAL: "10.128.0.0/11", REMOTE: "10.160.0.0/11"}
_DIRECT = {LOCAL: "10.192.0.0/12", REMOTE: "10.208.0.0/12"}
_STRAIGHT = "10.224.0.0/12"
_LINK = "192.168.{}.{}"
FLAGS = ("--tc-devices=eth0",)
"""Flags for the agents: the second link, eth1, must not have programs."""

PATHS = {
    "direct-local": (_DIRECT[LOCAL], ""),
    "nodeport-local": ("", LOCAL),
    "direct-remote": (_DIRECT[REMOTE], ""),
    "nodeport-remote": ("", REMOTE),
    STRAIGHT: (_STRAIGHT, ""),
}
"""By path: the network of its targets, or the location of the endpoints of its NodePorts; the other is ""."""

DIRECT_PATHS = [path for path, (network, _) in PATHS.items() if network]
"""The paths that exist without a proxy."""

INSIDE_PATHS = ("pods-one-node", "pods-two-nodes")
"""The paths of the pod "inside" to the own addresses of the other pods."""

_OTHER_FILES = 100


Reports = list[dict[str, Any]]
"""Reports of load clients: see `Load.churn`."""


class Held(NamedTuple):
    """The processes that hold connections open, and their reports about opening them."""

    holders: list["subprocess.Popen[bytes]"]
    opened: Reports

    @property
    def unopened(self) -> int:
        return sum(int(each["failed"]) for each in self.opened)

    @property
    def attempts(self) -> int:
        return sum(int(each["attempts"]) for each in self.opened)


def processes(held: int) -> int:
    """Return the number of processes needed to hold so many connections, given RLIMIT_NOFILE."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.ceil(held / (files - _OTHER_FILES))


class Crossing:
    """Both links, both pods and their servers, in a lab with two nodes. The agents need FLAGS."""

    def __init__(self, lab: Lab, load: Load, held: int = 0) -> None:
        """`held` is the number of connections to hold at the same time."""
        self.lab = lab
        self.load = load
        self.client = lab.outside
        first, second = lab.nodes
        self.pods = {LOCAL: first.pod(LOCAL), REMOTE: second.pod(REMOTE)}
        self.inside = first.pod("inside")
        self._files: dict[tuple[str, ...], Path] = {}
        self._processes = processes(held)
        self._second_address = lab.addresses.further(1)[0].v4
        lab.router.run(["sh", "-c", "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done"])
        for node in lab.nodes:
            self._link(node)
        self._route_pods()
        self._route_client()
        for pod in self.pods.values():
            for _ in range(1 + self._processes):
                load.serve(pod, workload.ENDPOINT_PORT)
        if held:
            with netns.entered(lab.outside.netns):
                Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("1024 65535")

    def _link(self, node: Node) -> None:
        """Add the node's second link, and the route over it to the client's second address."""
        router, own = (_LINK.format(node.index, host) for host in (0, 1))
        self.lab.ip(
            self.lab.router,
            f"link add direct-{node.index} type veth peer name eth1 netns {node.host.namespace}",
            f"addr add {router}/31 dev direct-{node.index}",
            f"link set direct-{node.index} up",
        )
        self.lab.ip(
            node.host,
            f"addr add {own}/31 dev eth1",
            "link set eth1 up",
            f"route add {self._second_address} via {router}",
        )

    def _route_pods(self) -> None:
        first, second = self.lab.nodes
        to_first, to_second = (_LINK.format(node.index, 1) for node in self.lab.nodes)
        for node, location in ((first, LOCAL), (second, REMOTE)):
            networks = [_SERVED[location], _DIRECT[location], *([_STRAIGHT] if location == REMOTE else [])]
            pod = self.pods[location]
            self.lab.ip(pod, *(f"route add local {network} dev lo" for network in networks))
            self.lab.ip(node.host, *(f"route add {network} via {pod.v4}" for network in networks))
        self.lab.ip(first.host, f"route add {_DIRECT[REMOTE]} via {_LINK.format(first.index, 0)}")
        self.lab.ip(
            self.lab.router,
            f"route add {_SERVED[REMOTE]} via {second.host.v4}",
            f"route add {_DIRECT[LOCAL]} via {to_first}",
            f"route add {_DIRECT[REMOTE]} via {to_second}",
            f"route add {_STRAIGHT} via {to_second}",
            # Via the first node, in both directions.
            f"route add {_DIRECT[REMOTE]} via {to_first} table 100",
            f"rule add iif outside to {_DIRECT[REMOTE]} lookup 100",
            f"route add {self._second_address} via {to_first} table 101",
            f"rule add iif direct-{second.index} from {_DIRECT[REMOTE]} lookup 101",
        )

    def _route_client(self) -> None:
        """Give the client a second address, which it uses for direct paths."""
        gateway = self.lab.addresses.router.v4
        self.lab.ip(
            self.client,
            f"addr add {self._second_address}/32 dev lo",
            *(
                f"route add {network} via {gateway} src {self._second_address}"
                for network in (*_DIRECT.values(), _STRAIGHT)
            ),
        )

    def write(self, services: int, endpoints: int) -> None:
        """Write the folder of manifests for the agents. `services_of` distributes the Services.

        Raises ConfigError for fewer than 2 Services, or more than there are NodePorts.
        """
        workload.require_node_ports(services)
        if services < 2:
            raise ConfigError("--services: each node needs a Service", "give --services=2 or more")
        folder = self.lab.folder / "manifests"
        folder.mkdir()
        names = {location: node.name for location, node in zip(_SERVED, self.lab.nodes, strict=True)}
        slices = [_slice(index, endpoints, names) for index in range(services)]
        manifests.write(
            folder / "services.json", manifests.listed(workload.services(services, node_ports=True))
        )
        manifests.write(folder / "slices.json", manifests.listed(slices))
        manifests.write(folder / "nodes.json", manifests.listed(self._nodes()))

    def _nodes(self) -> Iterator[manifests.Object]:
        """Yield both Nodes, which announce the port of mode ebpf-dsr. Agents in other modes ignore it."""
        annotations = {fields.DSR_PORT: str(modes.DSR_PORT)}
        for node in self.lab.nodes:
            yield manifests.node(node.name, [node.host.v4, node.host.v6], annotations=annotations)

    def targets(self, paths: Sequence[str], services: int, endpoints: int) -> Path:
        """Write the targets of each path, once: one for each Service or endpoint."""
        key = tuple(paths)
        if key not in self._files:
            own = dict(zip(INSIDE_PATHS, self.pods.values(), strict=True))
            lists = (
                [(own[path].v4, workload.ENDPOINT_PORT)]
                if path in own
                else targets_of(path, self.lab.node.v4, services, endpoints)
                for path in paths
            )
            self._files[key] = self.load.targets("-".join(("to", *paths)), *lists)
        return self._files[key]

    def hold(self, targets: Path, count: int) -> Held:
        """Open `count` connections and hold them."""
        share = -(-count // self._processes)
        started = [self.load.hold(self.client, targets, share) for _ in range(self._processes)]
        return Held([holder for holder, _ in started], [opened for _, opened in started])

    def end(self, held: Held) -> Reports:
        """Have a last exchange on each connection. The reports count failures to open connections again."""
        timeout = 120.0 + held.attempts / 1000
        return [self.load.end_churn(each, timeout=timeout) for each in held.holders]


def targets_of(path: str, node: str, services: int, endpoints: int) -> Iterator[Target]:
    """Return the targets of a path of PATHS. `node` is the address of the first node.

    >>> list(targets_of("nodeport-remote", "172.18.1.2", 4, 1))
    [('172.18.1.2', 15001), ('172.18.1.2', 15003)]
    >>> list(targets_of("direct-local", "172.18.1.2", 4, 1))
    [('10.192.0.1', 8080), ('10.192.0.2', 8080)]
    """
    network, location = PATHS[path]
    indices = services_of(location or LOCAL, services)
    if location:
        yield from ((node, workload.node_port(index)) for index in indices)
    else:
        yield from ((_nth(network, n), workload.ENDPOINT_PORT) for n in range(len(indices) * endpoints))


def services_of(location: str, services: int) -> range:
    """Return the indices of the Services at a location.

    Services with even indices have all endpoints on the first node, the others on the second.
    """
    return range(0 if location == LOCAL else 1, services, 2)


def _nth(network: str, index: int) -> str:
    return str(ipaddress.ip_network(network)[index + 1])


def _slice(index: int, endpoints: int, names: dict[str, str]) -> manifests.Object:
    location = REMOTE if index % 2 else LOCAL
    first = index // 2 * endpoints
    entries = [
        manifests.endpoint(_nth(_SERVED[location], first + n), node=names[location]) for n in range(endpoints)
    ]
    return workload.endpoint_slice(index, entries)
