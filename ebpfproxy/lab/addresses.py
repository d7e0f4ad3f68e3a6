"""The addresses of a lab, derived from its number."""

from typing import NamedTuple

_TUNNEL = 254
"""The host part of the address of the node's tunnel device, in the node's pod network."""


class Pair(NamedTuple):
    """One address of each family, as text."""

    v4: str
    v6: str


class Link(NamedTuple):
    """The addresses of both ends of a link, whose networks have the prefix lengths 31 and 127."""

    router: Pair
    edge: Pair


class Addresses(NamedTuple):
    """The addresses of the lab with this number, 1 to 254. The index of the first node is 0.

    The nodes' network is 172.18.N.0/24 and fd00:172:18:N::/64. The pod network of the first node is
    10.244.N.0/24 and fd00:10:244:N::/64, that of the second 10.245.N.0/24 and fd00:10:245:N::/64, and so on.
    """

    number: int

    @property
    def outside(self) -> Pair:
        return self._on_link(1)

    @property
    def router(self) -> Pair:
        return self._on_link(254)

    def node(self, index: int) -> Pair:
        return self._on_link(2 + index)

    def edge_link(self, index: int) -> Link:
        """Return the addresses of the link between the router and an edge."""
        return Link(*(self._on_link(128 + 2 * index + end) for end in (0, 1)))

    @property
    def vips(self) -> Pair:
        """The networks of load balancer IPs in labs with edges, as CIDRs."""
        return Pair(f"203.0.{self.number}.0/24", f"fd00:203:0:{self.number}::/112")

    def vip(self, host: int) -> Pair:
        return Pair(f"203.0.{self.number}.{host}", f"fd00:203:0:{self.number}::{host:x}")

    def gateway(self, node: int) -> Pair:
        """Return the node's addresses for its pods."""
        return self.pod(node, 1)

    def tunnel(self, node: int) -> Pair:
        return self.pod(node, _TUNNEL)

    def pod(self, node: int, host: int) -> Pair:
        four, six = f"10.{244 + node}.{self.number}", f"fd00:10:{244 + node}:{self.number}:"
        return Pair(f"{four}.{host}", f"{six}:{host:x}")

    def pods(self, node: int) -> Pair:
        """Return a node's pod network, as CIDRs."""
        return Pair(f"10.{244 + node}.{self.number}.0/24", f"fd00:10:{244 + node}:{self.number}::/64")

    @property
    def all_pods(self) -> Pair:
        """The cluster CIDRs: they contain exactly the pod networks of the first two nodes of all labs."""
        return Pair("10.244.0.0/15", "fd00:10:244::/47")

    def further(self, count: int) -> tuple[Pair, ...]:
        """Return up to 16 further addresses that are routed to the outside client but not assigned to it."""
        return tuple(self._on_link(16 + i) for i in range(min(count, 16)))

    @property
    def further_network(self) -> Pair:
        return Pair(f"172.18.{self.number}.16/28", f"fd00:172:18:{self.number}::10/124")

    def _on_link(self, host: int) -> Pair:
        return Pair(f"172.18.{self.number}.{host}", f"fd00:172:18:{self.number}::{host:x}")
