"""Addresses and servers, which are the same in the lab of every mode, so that one history fits all of them.

There are two nodes. The mode under test serves the first one, with the pods p and a. The other node has the
pods d and e. The external client is x.
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
"""The ports on which every server answers."""
NODE_PORTS = range(30_000, 30_100)
CLOSED_PORT = 9
"""A UDP port without a server and without a Service."""
PORTS = frozenset((*TARGET_PORTS[TCP], *TARGET_PORTS[UDP], *NODE_PORTS))
"""Ports that clients do not use."""

REMEMBERED = 180
"""Seconds after its last packet for which the first node remembers a flow: longer than any pause of a busy
machine between two steps of a history."""


class Server(NamedTuple):
    """A server that answers with its name, its port, and the client's address. `host`: in the host
    network."""

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
"""The address of each class of clients: p, the first node itself, and x."""

NODE, GATEWAY, OTHER_NODE = ADDRESSES.node(0), ADDRESSES.gateway(0), ADDRESSES.node(1)
"""The first node's uplink and gateway addresses; the second node's address."""

LOOPBACK = Pair("127.0.0.1", "::1")

EXTERNAL_IPS = (Pair("10.98.0.1", "fd00:10:96:1::1"), Pair("10.98.0.2", "fd00:10:96:1::2"), NODE)
BALANCER_IPS = (Pair("10.99.0.1", "fd00:10:96:2::1"), EXTERNAL_IPS[0], NODE)


def cluster_ips(index: int) -> Pair:
    """The ClusterIPs of the Service with this index."""
    return Pair(f"10.96.0.{index + 1}", f"fd00:10:96::{index + 1:x}")


FENCE_PORTS = {
    (server.name, number): 54_000 + at
    for at, (server, number) in enumerate((s, n) for s in SERVERS for n in TARGET_PORTS[UDP])
}
"""The ports of the Service that leads to one UDP socket of one server each, by the server's name and port."""
FENCE_IPS = cluster_ips(99)


def of_family(pair: Pair, of: Family) -> Address:
    return parse_address(pair.v4 if of is Family.IPV4 else pair.v6)
