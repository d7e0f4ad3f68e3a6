"""The pod network between nodes: routes, tunnels of the kernel, or a tunnel in user space."""

import enum
import fcntl
import os
import select
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.errors import ConfigError
from ebpfproxy.lab.addresses import Addresses
from ebpfproxy.lab.devices import ip
from ebpfproxy.lab.node import Node
from ebpfproxy.lab.pod import Pod


class PodNetwork(enum.Enum):
    """How the pods of several nodes reach each other. All kinds but ROUTED are for two nodes.

    - ROUTED: the router between the nodes has routes to the pods; with the other kinds it has none;
    - VXLAN: a VXLAN device;
    - IPIP: an IPIP device for IPv4, while IPv6 is routed. Not every kernel has it;
    - USER: a tun device and a relaying process, as Flannel's backend udp. It is the only device without an
      Ethernet header that every kernel has.
    """

    ROUTED = "routed"
    VXLAN = "vxlan"
    IPIP = "ipip"
    USER = "user"


class _Tunnel(NamedTuple):
    """`add` is the command of ip(8), with `local` and `remote`; `mtu` is the largest IP packet in bytes."""

    device: str
    add: str
    mtu: int
    has_ipv6: bool


_TUNNELS = {
    PodNetwork.VXLAN: _Tunnel(
        "vxlan0",
        "link add vxlan0 type vxlan id 1 dstport 8472 local {local} remote {remote}",
        mtu=1450,
        has_ipv6=True,
    ),
    PodNetwork.IPIP: _Tunnel(
        "ipip0", "link add ipip0 type ipip local {local} remote {remote}", mtu=1480, has_ipv6=False
    ),
    PodNetwork.USER: _Tunnel("flannel0", "tuntap add dev flannel0 mode tun", mtu=1472, has_ipv6=True),
}

_USER_PORT = 8285
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000  # include/uapi/linux/if_tun.h


class Backbone:
    """The pod network of the nodes. There is none before the first `join`."""

    def __init__(self, addresses: Addresses, router: Pod, nodes: tuple[Node, ...]) -> None:
        self._addresses = addresses
        self._router = router
        self._nodes = nodes
        self._kind: PodNetwork | None = None

    def join(self, kind: PodNetwork) -> None:
        """Switch to this kind. Raises Unsupported if the kernel lacks it; then the network is ROUTED.

        Raises ConfigError for a tunnel between more than two nodes.
        """
        if kind is self._kind:
            return
        if kind in _TUNNELS and self._kind in _TUNNELS:
            self.join(PodNetwork.ROUTED)
        if kind in _TUNNELS and len(self._nodes) > 2:
            raise ConfigError(f"a pod network of kind {kind.value} connects two nodes", "use routed")
        previous = _TUNNELS.get(self._kind) if self._kind else None
        for node, peer in zip(self._nodes, reversed(self._nodes), strict=True):
            if kind in _TUNNELS:
                self._open(_TUNNELS[kind], node, peer)
            if kind is PodNetwork.USER:
                _relay(node.host, _TUNNELS[kind].device, peer.host.v4)
            ip(self._router, *self._routes(kind, node))
            if previous:
                ip(node.host, f"link del {previous.device}")
        self._kind = kind

    def _open(self, tunnel: _Tunnel, node: Node, peer: Node) -> None:
        """Create the node's device with an address of its pod network, and routes to the peer's pods."""
        own, gateway = self._addresses.tunnel(node.index), self._addresses.tunnel(peer.index)
        pods, device = self._addresses.pods(peer.index), tunnel.device
        ip(
            node.host,
            tunnel.add.format(local=node.host.v4, remote=peer.host.v4),
            f"addr add {own.v4}/32 dev {device}",
            *([f"addr add {own.v6}/128 dev {device} nodad"] if tunnel.has_ipv6 else []),
            f"link set {device} mtu {tunnel.mtu} up",
            f"route replace {pods.v4} via {gateway.v4} dev {device} onlink",
            *([f"route replace {pods.v6} via {gateway.v6} dev {device} onlink"] if tunnel.has_ipv6 else []),
        )

    def _routes(self, kind: PodNetwork, node: Node) -> Iterator[str]:
        """Yield the commands for the router's routes to the node's pods."""
        pods = self._addresses.pods(node.index)
        routes_ipv4 = kind is PodNetwork.ROUTED
        routes_ipv6 = kind in (PodNetwork.ROUTED, PodNetwork.IPIP)
        yield f"route replace {pods.v4} via {node.host.v4}" if routes_ipv4 else _blackhole(pods.v4)
        yield f"route replace {pods.v6} via {node.host.v6}" if routes_ipv6 else _blackhole(pods.v6)


def _blackhole(network: str) -> str:
    return f"route replace blackhole {network}"


def _relay(host: Pod, device: str, peer: str) -> None:
    """Relay the packets of the host's tun device `device` to the host with the IPv4 address `peer`, and back.

    Each packet is in one UDP datagram. The function returns once the relay works; the relay runs until the
    lab ends. The peer must run one, too.
    """

    def run(ready: int) -> None:
        tun = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as carrier:
            carrier.bind((host.v4, _USER_PORT))
            os.write(ready, b"!")
            os.close(ready)
            _relay_packets(tun, carrier, (peer, _USER_PORT))

    host.start_until_ready(run)


def _relay_packets(tun: int, carrier: socket.socket, peer: tuple[str, int]) -> None:
    while True:
        readable, _, _ = select.select([tun, carrier.fileno()], [], [])
        if tun in readable:
            carrier.sendto(os.read(tun, 1 << 16), peer)
        if carrier.fileno() in readable:
            os.write(tun, carrier.recv(1 << 16))
