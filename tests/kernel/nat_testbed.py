"""An external client, a node that translates with nftables rules, and two pods behind it, in three separate
network namespaces."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netlink.conntrack import Flow
from ebpfproxy.model.address import Family, Protocol
from tests.support.namespace import Namespace, namespace

PATIENCE = 60.0
UDP, TCP = Protocol.UDP, Protocol.TCP
DNS, TARGET = 53, 5353


class Addresses(NamedTuple):
    family: Family
    client: str
    node: str
    node_inside: str
    pods: tuple[str, str]
    vip: str
    length: int
    nft: str

    @property
    def number(self) -> int:
        return socket.AF_INET if self.family is Family.IPV4 else socket.AF_INET6


ADDRESSES = {
    Family.IPV4: Addresses(
        Family.IPV4, "192.0.2.1", "192.0.2.10", "10.1.0.254", ("10.1.0.1", "10.1.0.2"), "10.96.0.53", 24, "ip"
    ),
    Family.IPV6: Addresses(
        Family.IPV6,
        "2001:db8::1",
        "2001:db8::10",
        "fd01::fe",
        ("fd01::1", "fd01::2"),
        "fd00:96::53",
        64,
        "ip6",
    ),
}


_TRACK = "ct state invalid counter"


class Testbed:
    """The three namespaces with the addresses of one family."""

    __test__ = False  # pytest collects classes by their names

    def __init__(self, client: Namespace, node: Namespace, pods: Namespace, at: Addresses) -> None:
        self.client, self.node, self.pods, self.at = client, node, pods, at

    def rules(self, *, track: bool = True, **targets: tuple[str, int, str]) -> None:
        """Replace the node's rules. Each of `targets` has an address ("" for the node's addresses), a port,
        and the address of a pod ("" for a frontend without endpoints). `track`: with a rule that matches on
        the state of packets, as every backend has."""
        table = f"{self.at.nft} ebpfproxy-test"
        lines = [
            self._rule(protocol, address, number, pod)
            for protocol in ("udp", "tcp")
            for address, number, pod in targets.values()
            if pod
        ]
        body = "\n".join(lines)
        self.nft(
            f"table {table}\ndelete table {table}\ntable {table} {{\n"
            f"chain pre {{ type nat hook prerouting priority -100;\n{body}\n}}\n"
            f"chain out {{ type nat hook output priority -100;\n{body}\n}}\n"
            f"chain track {{ type filter hook forward priority 0;\n{_TRACK if track else ''}\n}}\n}}\n"
        )

    def _rule(self, protocol: str, address: str, number: int, pod: str) -> str:
        of = self.at.nft
        where = f"{of} daddr {address}" if address else "fib daddr type local"
        to = f"[{pod}]" if self.at.family is Family.IPV6 else pod
        return f"{where} {protocol} dport {number} dnat to {to}:{TARGET}"

    def nft(self, text: str) -> None:
        """Run a script of nft(8) on the node."""
        with self.node.entered():
            subprocess.run(["nft", "-f", "-"], input=text.encode(), check=True, timeout=PATIENCE)

    def flows(self, protocol: Protocol = UDP) -> list[Flow]:
        with self.node.entered():
            return list(conntrack.flows(protocol, self.at.family))

    @contextlib.contextmanager
    def pod(self, number: int) -> Iterator[socket.socket]:
        """A server's socket in the first (0) or second (1) pod."""
        with self.pods.entered():
            server = socket.socket(self.at.number, socket.SOCK_DGRAM)
        with server:
            server.bind((self.at.pods[number], TARGET))
            server.settimeout(PATIENCE)
            yield server

    @contextlib.contextmanager
    def client_socket(self, where: Namespace, address: str, number: int = DNS) -> Iterator[socket.socket]:
        """A connected client's socket in a namespace."""
        with where.entered():
            client = socket.socket(self.at.number, socket.SOCK_DGRAM)
        with client:
            client.connect((address, number))
            client.settimeout(PATIENCE)
            yield client


@contextlib.contextmanager
def nat_testbeds() -> Iterator[dict[Family, Testbed]]:
    """Create the namespaces; both families share them."""
    with namespace("ct-client") as client, namespace("ct-node") as node, namespace("ct-pods") as pods:
        for each in (client, node, pods):
            each.ip("link set lo up")
        node.ip(
            "link add out type veth peer name in0",
            "link add inside type veth peer name in1",
            f"link set in0 netns {client.name}",
            f"link set in1 netns {pods.name}",
        )
        for where, device in ((client, "in0"), (node, "out"), (node, "inside"), (pods, "in1")):
            where.ip(f"link set {device} up")
        for at in ADDRESSES.values():
            flag = "nodad" if at.family is Family.IPV6 else ""
            client.ip(f"addr add {at.client}/{at.length} dev in0 {flag}")
            node.ip(f"addr add {at.node}/{at.length} dev out {flag}")
            node.ip(f"addr add {at.node_inside}/{at.length} dev inside {flag}")
            pods.ip(*(f"addr add {pod}/{at.length} dev in1 {flag}" for pod in at.pods))
            client.ip(f"route add default via {at.node}")
            node.ip(f"route add default via {at.client}")
            pods.ip(f"route add default via {at.node_inside}")
        with node.entered():
            sysctl.ensure("net/ipv4/ip_forward", "1")
            sysctl.ensure("net/ipv6/conf/all/forwarding", "1")
        yield {of: Testbed(client, node, pods, at) for of, at in ADDRESSES.items()}


def end_all_flows(testbed: Testbed) -> None:
    """End all flows of the node."""
    with testbed.node.entered():
        for protocol in (UDP, TCP):
            for flow in conntrack.flows(protocol):
                conntrack.delete(flow)


def answers(client: socket.socket, server: socket.socket) -> None:
    """A datagram of the client reaches that server, and its reply reaches the client."""
    client.send(b"?")
    question, sender = server.recvfrom(16)
    assert question == b"?"
    server.sendto(b"!", sender)
    assert client.recv(16) == b"!"
