"""Two nodes, a client outside, and Services whose endpoints are on the one node or on the other.

SyncHooks the way by which Services are reached, each node has a second link to the router, on which no
agent has programs. By it the same client reaches the same two pods at other addresses of theirs, with
as many hops, and with no proxy on the way: that is what "direct" means here.

    client outside -- router == node -- pod "local"      the node that is dialed
                             == node-2 -- pod "remote"   the one that has the other endpoints

Which link a packet takes depends on its destination alone, so that a route costs the same on both.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from pathlib import Path

from ebpfproxy.bench import iperf, workload
from ebpfproxy.bench.load import Load, Target
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Lab, Node, Pod, manifests

LOCAL, REMOTE = "local", "remote"
STRAIGHT = "direct-straight"
"""To the second node's pod without the first node: a hop less than any other path to it."""

IPERF_NODE_PORTS = {LOCAL: 32_600, REMOTE: 32_601}

_SERVED = {LOCAL: "10.128.0.0/11", REMOTE: "10.160.0.0/11"}
_DIRECT = {LOCAL: "10.192.0.0/12", REMOTE: "10.208.0.0/12"}
_STRAIGHT = "10.224.0.0/12"
_LINK = "192.168.{}.{}"
FLAGS = ("--tc-devices=eth0",)
"""Of its agents: the second link, eth1, has to be without programs."""

PATHS = {
    "direct-local": (_DIRECT[LOCAL], ""),
    "nodeport-local": ("", LOCAL),
    "direct-remote": (_DIRECT[REMOTE], ""),
    "nodeport-remote": ("", REMOTE),
    STRAIGHT: (_STRAIGHT, ""),
}
"""Either the network in which its targets are, or whose NodePorts are."""

DIRECT_PATHS = [path for path, (network, _) in PATHS.items() if network]
"""Those that are there without a proxy."""


class Crossing:
    """Both links, both pods and their servers, in a lab with two nodes. Its agents need FLAGS."""

    def __init__(self, lab: Lab, load: Load, servers: int = 1) -> None:
        """`servers`: processes in each pod that share its connections."""
        self.lab = lab
        self.load = load
        self.client = lab.outside
        first, second = lab.nodes
        self.pods = {LOCAL: first.pod(LOCAL), REMOTE: second.pod(REMOTE)}
        self._second_address = lab.addresses.further(1)[0].v4
        lab.router.run(["sh", "-c", "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done"])
        for node in lab.nodes:
            self._link(node)
        self._route_pods()
        self._route_client()
        for pod in self.pods.values():
            for _ in range(servers):
                load.serve(pod, workload.ENDPOINT_PORT)

    def _link(self, node: Node) -> None:
        """The second link; what leads to the client's second address goes back by it."""
        router, here = (_LINK.format(node.index, host) for host in (0, 1))
        self.lab.ip(
            self.lab.router,
            f"link add direct-{node.index} type veth peer name eth1 netns {node.host.namespace}",
            f"addr add {router}/31 dev direct-{node.index}",
            f"link set direct-{node.index} up",
        )
        self.lab.ip(
            node.host,
            f"addr add {here}/31 dev eth1",
            "link set eth1 up",
            f"route add {self._second_address} via {router}",
        )

    def _route_pods(self) -> None:
        first, second = self.lab.nodes
        to_first, to_second = (_LINK.format(node.index, 1) for node in self.lab.nodes)
        for node, which in ((first, LOCAL), (second, REMOTE)):
            networks = [_SERVED[which], _DIRECT[which], *([_STRAIGHT] if which == REMOTE else [])]
            pod = self.pods[which]
            self.lab.ip(pod, *(f"route add local {network} dev lo" for network in networks))
            self.lab.ip(node.host, *(f"route add {network} via {pod.v4}" for network in networks))
        self.lab.ip(first.host, f"route add {_DIRECT[REMOTE]} via {_LINK.format(first.index, 0)}")
        self.lab.ip(
            self.lab.router,
            f"route add {_SERVED[REMOTE]} via {second.host.v4}",
            f"route add {_DIRECT[LOCAL]} via {to_first}",
            f"route add {_DIRECT[REMOTE]} via {to_second}",
            f"route add {_STRAIGHT} via {to_second}",
            # By the first node, there and back.
            f"route add {_DIRECT[REMOTE]} via {to_first} table 100",
            f"rule add iif outside to {_DIRECT[REMOTE]} lookup 100",
            f"route add {self._second_address} via {to_first} table 101",
            f"rule add iif direct-{second.index} from {_DIRECT[REMOTE]} lookup 101",
        )

    def _route_client(self) -> None:
        """It has a second address, and uses that for what is direct."""
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
        """The folder of manifests for the agents: see `services_of` for which Service is whose."""
        workload.require_node_ports(services)
        if services < 2:
            raise ConfigError("one service is not one on each node", "--services=2 at the least")
        folder = self.lab.folder / "manifests"
        folder.mkdir()
        names = {which: node.name for which, node in zip(_SERVED, self.lab.nodes, strict=True)}
        slices = [_slice(index, endpoints, names) for index in range(services)]
        manifests.write(
            folder / "services.json", manifests.listed(workload.services(services, node_ports=True))
        )
        manifests.write(folder / "slices.json", manifests.listed(slices))
        manifests.write(folder / "iperf.json", manifests.listed(_iperf_objects(self.pods, names)))

    def serve_iperf(self) -> None:
        iperf.require()
        for pod in self.pods.values():
            iperf.serve(pod)

    def targets(self, paths: Sequence[str], services: int, endpoints: int) -> Path:
        """A list of targets for each path, each as long as there are Services or endpoints."""
        lists = (targets_of(path, self.lab.node.v4, services, endpoints) for path in paths)
        return self.load.targets("-".join(("to", *paths)), *lists)

    def iperf_target(self, path: str) -> Target:
        network, which = PATHS[path]
        if which:
            return self.lab.node.v4, IPERF_NODE_PORTS[which]
        return _nth(network, 0), iperf.PORT


def targets_of(path: str, node: str, services: int, endpoints: int) -> Iterator[Target]:
    """What a client dials on a path of PATHS, `node` being the address of the first node.

    >>> list(targets_of("nodeport-remote", "172.18.1.2", 4, 1))
    [('172.18.1.2', 15001), ('172.18.1.2', 15003)]
    >>> list(targets_of("direct-local", "172.18.1.2", 4, 1))
    [('10.192.0.1', 8080), ('10.192.0.2', 8080)]
    """
    network, which = PATHS[path]
    indices = services_of(which or LOCAL, services)
    if which:
        yield from ((node, workload.node_port(index)) for index in indices)
    else:
        yield from ((_nth(network, n), workload.ENDPOINT_PORT) for n in range(len(indices) * endpoints))


def services_of(which: str, services: int) -> range:
    """By index: every other one, from 0, has all its endpoints on the first node, the rest on the second."""
    return range(0 if which == LOCAL else 1, services, 2)


def _nth(network: str, index: int) -> str:
    return str(ipaddress.ip_network(network)[index + 1])


def _slice(index: int, endpoints: int, names: dict[str, str]) -> manifests.Object:
    which = REMOTE if index % 2 else LOCAL
    first = index // 2 * endpoints
    entries = [
        manifests.endpoint(_nth(_SERVED[which], first + n), node=names[which]) for n in range(endpoints)
    ]
    return workload.endpoint_slice(index, entries)


def _iperf_objects(pods: dict[str, Pod], names: dict[str, str]) -> Iterator[manifests.Object]:
    """Services of one endpoint: a test has two connections, which have to reach the same server."""
    for number, (which, pod) in enumerate(pods.items()):
        port = manifests.port(iperf.PORT, target=iperf.PORT, node_port=IPERF_NODE_PORTS[which])
        endpoint = manifests.endpoint(pod.v4, node=names[which])
        yield manifests.service(
            f"iperf-{which}", [workload.cluster_ip(workload.SERVICES_MAX + number)], [port]
        )
        yield manifests.endpoint_slice(
            f"iperf-{which}-slice", f"iperf-{which}", [endpoint], [manifests.port(iperf.PORT)]
        )
