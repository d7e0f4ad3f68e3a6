"""A node with two uplinks: the testbed for NodePorts and load balancer addresses that arrive at either.

    client ── router ──┬── eth0 (first uplink, preferred default route) ── node ── pods
                       └── eth1 (second uplink) ──────────────────────────┘

The second node has one uplink. Its agent does not run: it only hosts endpoints.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.lab import Agent, Lab, Pod, sockets
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.linux import sysctl
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, UDP, Dial, outcomes
from tests.kernel.cluster import Cluster
from tests.kernel.two_nodes import PORTS, Everywhere, TwoNodes, name_and_client

FIRST, SECOND = "eth0", "eth1"
UPLINKS = (FIRST, SECOND)
CASES = (("Cluster", "here"), ("Cluster", "there"), ("Local", "here"))
"""External traffic policies, each with the node of an endpoint that answers."""
NAMES = {"here": "a", "there": "d"}
"""Name of the endpoint by its node."""
FAMILIES = ("v4", "v6")
PROTOCOLS = (TCP, UDP)
SILENCE = 0.5
"""Seconds after which a client without a reply counts as SILENT."""
STRICT, LOOSE = "1", "2"
"""Values of rp_filter."""

BALANCER_NETWORKS = Pair("10.99.0.0/16", "fd00:10:96:2::/64")
"""All load balancer addresses of `Everywhere`."""
LESS_PREFERRED = 4096
"""Metric of the second uplink's default route; the first uplink's is 0 for IPv4 and 1024 for IPv6."""
RP_FILTER = "net/ipv4/conf/{}/rp_filter"


class FrontendAtUplink(NamedTuple):
    """A frontend and the uplink at which the client's request reaches the node."""

    frontend: str
    uplink: str
    family: str
    protocol: Protocol


class Uplinks(TwoNodes):
    """As `TwoNodes`, with a second link between the router and the first node.

    `addresses` are the first node's, by uplink. Load balancer addresses are routed to the first uplink
    unless `balance_to` changes it. The node's reverse path filter is strict, as in every lab.
    """

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        number = lab.number
        self.second_gateway = Pair(f"172.19.{number}.254", f"fd00:172:19:{number}::fe")
        self.second_address = Pair(f"172.19.{number}.2", f"fd00:172:19:{number}::2")
        self.addresses = {FIRST: Pair(self.node.v4, self.node.v6), SECOND: self.second_address}
        self.gateways = {FIRST: lab.addresses.router, SECOND: self.second_gateway}
        self.router_devices = {FIRST: lab.nodes[0].cgroup.name, SECOND: "second"}
        self._link()

    def _link(self) -> None:
        gateway, address = self.second_gateway, self.second_address
        self.lab.ip(
            self.lab.router,
            f"link add second type veth peer name {SECOND} netns {self.node.namespace}",
            f"addr add {gateway.v4}/32 dev second",
            f"addr add {gateway.v6}/128 dev second nodad",
            "link set second up",
            f"route add {address.v4}/32 dev second",
            f"route add {address.v6}/128 dev second",
        )
        self.lab.ip(
            self.node,
            f"addr add {address.v4}/32 dev {SECOND}",
            f"addr add {address.v6}/128 dev {SECOND} nodad",
            f"link set {SECOND} up",
            f"route add {gateway.v4}/32 dev {SECOND} scope link",
            f"route add {gateway.v6}/128 dev {SECOND}",
            f"route add default via {gateway.v4} dev {SECOND} metric {LESS_PREFERRED}",
            f"route add default via {gateway.v6} dev {SECOND} metric {LESS_PREFERRED}",
        )

    def launch(self, *flags: str, before: Sequence[str] = ()) -> Agent:
        """Start only the first node's agent."""
        return Cluster.launch(self, *self._all_flags(flags), before=before)

    # Destinations

    def dial(self, web: Everywhere, row: FrontendAtUplink, timeout: float, source: str = "") -> Dial:
        if row.frontend == "NodePort":
            address: str = getattr(self.addresses[row.uplink], row.family)
            return Dial(row.protocol, address, web.node_port, timeout, (source, 0))
        address = web.balancer_ips[row.family == "v6"]
        return Dial(row.protocol, address, PORTS[row.protocol], timeout, (source, 0))

    # The network. Each change lasts until the end of the block.

    @contextlib.contextmanager
    def balance_to(self, *uplinks: str) -> Iterator[None]:
        """The router sends packets to load balancer addresses unchanged to these uplinks of the node, as a
        load balancer with direct server return does."""
        with contextlib.ExitStack() as stack:
            for family in FAMILIES:
                network = getattr(BALANCER_NETWORKS, family)
                hops = " ".join(f"nexthop via {getattr(self.addresses[each], family)}" for each in uplinks)
                route = f"{network} table 100 {hops}"
                stack.enter_context(self.routes(self.lab.router, route))
            yield

    @contextlib.contextmanager
    def routes(self, netns: Pod, *routes: str) -> Iterator[None]:
        with self.commands(netns, [(f"route replace {route}", f"route del {route}") for route in routes]):
            yield

    @contextlib.contextmanager
    def rules(self, netns: Pod, *rules: str) -> Iterator[None]:
        """IPv4 routing rules."""
        with self.commands(netns, [(f"rule add {rule}", f"rule del {rule}") for rule in rules]):
            yield

    @contextlib.contextmanager
    def commands(self, netns: Pod, pairs: Sequence[tuple[str, str]]) -> Iterator[None]:
        """Run commands of ip(8), each with a command that reverts it."""
        with contextlib.ExitStack() as stack:
            for do, undo in pairs:
                self.lab.ip(netns, do)
                stack.callback(self.lab.ip, netns, undo)
            yield

    @contextlib.contextmanager
    def sysctls(self, netns: Pod, values: Mapping[str, str]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                previous = netns.call(functools.partial(sysctl.read, name))
                netns.call(functools.partial(sysctl.ensure, name, value))
                stack.callback(netns.call, functools.partial(sysctl.ensure, name, previous))
            yield

    @contextlib.contextmanager
    def asymmetric(self) -> Iterator[None]:
        """Neither the node nor the router drops packets whose source address is routed to another link."""
        with self.reverse_path_filter(self.node, LOOSE), self.reverse_path_filter(self.lab.router, LOOSE):
            yield

    @contextlib.contextmanager
    def reverse_path_filter(self, netns: Pod, value: str) -> Iterator[None]:
        """For all devices: the kernel uses the larger value of `all` and the device's setting."""
        with self.sysctls(netns, {RP_FILTER.format("all"): value}):
            yield

    @contextlib.contextmanager
    def checked_sources(self) -> Iterator[None]:
        """The router drops packets that the node sends by another link than the one for their source address,
        as cloud networks drop packets from an interface with another interface's address.

        With nftables, because rp_filter exists only for IPv4. Load balancer addresses are dropped, too.
        """
        devices = ", ".join(f'"{device}"' for device in self.router_devices.values())
        rule = "fib saddr . iif oif missing drop"
        text = f"""
            table inet sources {{
                chain prerouting {{
                    type filter hook prerouting priority raw;
                    iifname {{ {devices} }} meta l4proto {{ tcp, udp }} {rule}
                }}
            }}
        """
        with self.nftables(self.lab.router, "inet sources", text):
            yield

    @contextlib.contextmanager
    def multipath(self) -> Iterator[None]:
        """The node's default routes have two next hops of equal cost, one for each uplink."""
        with contextlib.ExitStack() as stack:
            for family in FAMILIES:
                first, second = (getattr(self.gateways[each], family) for each in UPLINKS)
                hops = f"nexthop via {first} dev {FIRST} nexthop via {second} dev {SECOND}"
                if family == "v4":
                    self.lab.ip(self.node, f"route replace default {hops}")
                    stack.callback(self.lab.ip, self.node, f"route replace default via {first} dev {FIRST}")
                else:
                    stack.enter_context(self.routes(self.node, f"default metric 512 {hops}"))
            yield

    @contextlib.contextmanager
    def nftables(self, netns: Pod, table: str, text: str) -> Iterator[None]:
        netns.run(["nft", "-f", "-"], stdin=text)
        try:
            yield
        finally:
            netns.run(["nft", "delete", "table", *table.split()])

    @contextlib.contextmanager
    def equal_cost_routes(self, hash_policy: str) -> Iterator[None]:
        """`multipath`, also for load balancer addresses. The path depends on addresses (`hash_policy` 0), or
        on addresses and ports (1)."""
        names = [f"net/ipv{version}/fib_multipath_hash_policy" for version in (4, 6)]
        chosen = dict.fromkeys(names, hash_policy)
        with (
            self.multipath(),
            self.balance_to(*UPLINKS),
            self.reverse_path_filter(self.lab.router, LOOSE),
            self.sysctls(self.node, chosen),
            self.sysctls(self.lab.router, chosen),
        ):
            yield

    def sent(self) -> dict[str, int]:
        """The number of packets that the node has sent by each uplink."""
        return self.node.call(_sent)


def _sent() -> dict[str, int]:
    """Counters of the calling process's network namespace; /sys may belong to another one."""
    lines = [line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines()]
    return {name.strip(): int(text.split()[9]) for name, _, text in lines if name.strip() in UPLINKS}


def more(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """The difference of two results of `sent`."""
    return {uplink: now[uplink] - before[uplink] for uplink in UPLINKS}


def every(frontends: Sequence[tuple[str, str]], families: Sequence[str] = FAMILIES) -> list[FrontendAtUplink]:
    """All combinations of these frontends with families, TCP and UDP."""
    return [
        FrontendAtUplink(frontend, uplink, family, protocol)
        for (frontend, uplink), family, protocol in itertools.product(frontends, families, PROTOCOLS)
    ]


def endpoint(uplinks: Uplinks, place: str) -> Pod:
    """The endpoint on the first node ("here") or on the second one ("there")."""
    return {"here": uplinks.a, "there": uplinks.d}[place]


def answers(
    uplinks: Uplinks,
    policy: str,
    place: str,
    rows: Sequence[FrontendAtUplink],
    timeout: float = sockets.ANSWERED,
) -> dict[FrontendAtUplink, str]:
    """The name of the endpoint that answers the client at each frontend of a new Service, or SILENT.

    `policy`: the external traffic policy; `place`: the endpoint's node; `timeout` in seconds.
    """
    web = uplinks.everywhere(externalTrafficPolicy=policy).to(endpoint(uplinks, place))
    dials = [uplinks.dial(web, row, timeout) for row in rows]
    return {
        row: name_and_client(found)[0] for row, found in zip(rows, outcomes(uplinks.x, dials), strict=True)
    }


def wanted(place: str, rows: Iterable[FrontendAtUplink]) -> dict[FrontendAtUplink, str]:
    """The result of `answers` if all frontends answer."""
    return dict.fromkeys(rows, NAMES[place])
