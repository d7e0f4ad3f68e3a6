"""Who is where: the same in the lab of every mode, so that one history suits them all.

Two nodes, the first of which is served; its pods p and a, the other one's d and e; a client outside, x.
"""

from typing import NamedTuple

from ebpfproxy.lab.addresses import Addresses, Pair
from ebpfproxy.model.address import Address, Family, Protocol, parse_address

NUMBER = 81
ADDRESSES = Addresses(NUMBER)
HERE, THERE = f"node-{NUMBER}", f"node-{NUMBER}-2"
"""The nodes' names."""

TCP, UDP = Protocol.TCP, Protocol.UDP
TARGET_PORTS = {TCP: (8080, 8081), UDP: (5353, 5354)}
"""On which every server answers."""
NODE_PORTS = range(30_000, 30_100)
PORTS = frozenset((*TARGET_PORTS[TCP], *TARGET_PORTS[UDP], *NODE_PORTS))
"""Not for clients."""

REMEMBERED = 180
"""Seconds for which the first node remembers a flow at the most, after its last packet: longer than any pause
that a busy machine makes between two steps of a history."""


class Server(NamedTuple):
    """What answers with its name, its port, and the client's address. `host`: in its node's own network."""

    name: str
    at: Pair
    node: str
    host: bool = False


SERVERS = (
    Server("p", ADDRESSES.pod(0, 2), HERE),
    Server("a", ADDRESSES.pod(0, 3), HERE),
    Server("d", ADDRESSES.pod(1, 2), THERE),
    Server("e", ADDRESSES.pod(1, 3), THERE),
    Server("host", ADDRESSES.node(0), HERE, host=True),
    Server("host-2", ADDRESSES.node(1), THERE, host=True),
)
BY_ADDRESS = {parse_address(text): server for server in SERVERS for text in server.at}

CLIENTS = {"pod": ADDRESSES.pod(0, 2), "node": ADDRESSES.node(0), "outside": ADDRESSES.outside}
"""By their class: p, the first node itself, and x."""

NODE, GATEWAY, OTHER_NODE = ADDRESSES.node(0), ADDRESSES.gateway(0), ADDRESSES.node(1)
"""The first node as its network knows it, and as its pods do; the second node."""

LOOPBACK = Pair("127.0.0.1", "::1")

EXTERNAL_IPS = (Pair("10.98.0.1", "fd00:10:96:1::1"), Pair("10.98.0.2", "fd00:10:96:1::2"), NODE)
BALANCER_IPS = (Pair("10.99.0.1", "fd00:10:96:2::1"), EXTERNAL_IPS[0], NODE)


def cluster_ips(index: int) -> Pair:
    """Of the Service with this index."""
    return Pair(f"10.96.0.{index + 1}", f"fd00:10:96::{index + 1:x}")


def of_family(pair: Pair, of: Family) -> Address:
    return parse_address(pair.v4 if of is Family.IPV4 else pair.v6)
