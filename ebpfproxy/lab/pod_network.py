"""How the pods of two nodes reach each other."""

import enum
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.lab import user_tunnel
from ebpfproxy.lab.addresses import Addresses
from ebpfproxy.lab.devices import ip
from ebpfproxy.lab.node import Node
from ebpfproxy.lab.pod import Pod


class PodNetwork(enum.Enum):
    """ROUTED: the network between the nodes knows the pods' addresses. Around tunnels it does not.

    IPIP carries IPv4 alone, and IPv6 is routed then; not every kernel has it. USER is a tun device and a
    process that relays, as Flannel's backend udp: the one device without an Ethernet header that
    every kernel has.
    """

    ROUTED = "routed"
    VXLAN = "vxlan"
    IPIP = "ipip"
    USER = "user"


class _Tunnel(NamedTuple):
    """`add`: to ip(8), with `here` and `there`; `mtu` in bytes of an IP packet; `six`: takes IPv6, too."""

    device: str
    add: str
    mtu: int
    six: bool


_TUNNELS = {
    PodNetwork.VXLAN: _Tunnel(
        "vxlan0",
        "link add vxlan0 type vxlan id 1 dstport 8472 local {here} remote {there}",
        mtu=1450,
        six=True,
    ),
    PodNetwork.IPIP: _Tunnel(
        "ipip0", "link add ipip0 type ipip local {here} remote {there}", mtu=1480, six=False
    ),
    PodNetwork.USER: _Tunnel("flannel0", "tuntap add dev flannel0 mode tun", mtu=1472, six=True),
}


class Backbone:
    """What joins two nodes' pod networks: nothing at first, and another kind after each `join`."""

    def __init__(self, addresses: Addresses, router: Pod, nodes: tuple[Node, ...]) -> None:
        self._addresses = addresses
        self._router = router
        self._first, self._second = nodes
        self._kind: PodNetwork | None = None

    def join(self, kind: PodNetwork) -> None:
        """Have it of this kind. Raises Unsupported where the kernel lacks it; then it is ROUTED."""
        if kind is self._kind:
            return
        if kind in _TUNNELS and self._kind in _TUNNELS:
            self.join(PodNetwork.ROUTED)
        previous = _TUNNELS.get(self._kind) if self._kind else None
        for node, peer in ((self._first, self._second), (self._second, self._first)):
            if kind in _TUNNELS:
                self._open(_TUNNELS[kind], node, peer)
            if kind is PodNetwork.USER:
                user_tunnel.relay(node.host, _TUNNELS[kind].device, peer.host.v4)
            ip(self._router, *self._routes(kind, node))
            if previous:
                ip(node.host, f"link del {previous.device}")
        self._kind = kind

    def _open(self, tunnel: _Tunnel, node: Node, peer: Node) -> None:
        """The device has an address of the node's own pod network; the other node's pods are behind it."""
        own, gateway = self._addresses.tunnel(node.index), self._addresses.tunnel(peer.index)
        pods, device = self._addresses.pods(peer.index), tunnel.device
        ip(
            node.host,
            tunnel.add.format(here=node.host.v4, there=peer.host.v4),
            f"addr add {own.v4}/32 dev {device}",
            *([f"addr add {own.v6}/128 dev {device} nodad"] if tunnel.six else []),
            f"link set {device} mtu {tunnel.mtu} up",
            f"route replace {pods.v4} via {gateway.v4} dev {device} onlink",
            *([f"route replace {pods.v6} via {gateway.v6} dev {device} onlink"] if tunnel.six else []),
        )

    def _routes(self, kind: PodNetwork, node: Node) -> Iterator[str]:
        """The router's to the node's pods."""
        pods = self._addresses.pods(node.index)
        four, six = kind is PodNetwork.ROUTED, kind in (PodNetwork.ROUTED, PodNetwork.IPIP)
        yield f"route replace {pods.v4} via {node.host.v4}" if four else f"route replace blackhole {pods.v4}"
        yield f"route replace {pods.v6} via {node.host.v6}" if six else f"route replace blackhole {pods.v6}"
