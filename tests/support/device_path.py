"""The classifiers at real devices with foreign programs before and after them. Packets use the devices.

The devices are those of packet_path.py. Their peers are in a namespace without addresses, where frames are
sent and received. The node's stack forwards by routes with permanent neighbors, so nothing waits for a
resolution.
"""

import contextlib
import os
import select
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.linux.bpf import tc, tcx
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from tests.kernel.others import Way, program
from tests.support.conversations import Segment, end, frame
from tests.support.namespace import Namespace, namespace
from tests.support.offloads import set_offload
from tests.support.packet_path import DEVICES, SHOT, UNSPEC, Outcome, PacketPath
from tests.support.packets import THERE

_ALL, _FORCE_BUFFER = 3, 33  # ETH_P_ALL, SO_RCVBUFFORCE
_SOL_PACKET, _IGNORE_OUTGOING = 263, 23
_BUFFER = 64 << 20  # bytes
_PATIENCE = 30.0  # seconds for a fence
_PASSES = 8
"""How often a packet may be redirected to its ingress device, each time behind all queued packets."""
_FENCE = "198.18.7.1", "10.244.2.77", 7
_WAYS = {
    "net": ("default", "::/0"),
    "pod": ("10.244.1.0/24", "fd00:1::/64"),
    "tunnel": ("10.244.2.0/24", "fd00:2::/64"),
}


class Received(NamedTuple):
    """A frame that the node sent by a device."""

    device: str
    raw: bytes


class Wires:
    """The peers of the devices. One CPU does all the work, so that packets keep their order."""

    def __init__(self, sockets: dict[str, socket.socket], receiver: socket.socket, beyond: Namespace) -> None:
        self._sockets = sockets
        self._receiver = receiver
        self.beyond = beyond
        self._fences = 0

    def send(self, device: str, raw: bytes) -> None:
        """Send a frame that arrives at the device."""
        self._sockets[device].send(raw)

    def accept_xdp_frames(self) -> None:
        """Let the devices and their peers send frames of XDP programs: this needs GRO at both ends."""
        for name in DEVICES:
            set_offload(netns.path(self.beyond.name), f"{name}-peer", "gro", True)
            set_offload(Path("/proc/thread-self/ns/net"), name, "gro", True)

    def drain(self, passes: int = 1) -> list[Received]:
        """The frames that the node has sent since the last call. This sends a fence, a forwarded packet for
        no Service: once it is received, all packets before it have been processed. Raises TimeoutError."""
        found: list[Received] = []
        for _ in range(passes):
            self._fences += 1
            number = struct.pack("!Q", self._fences)
            source, to, port = _FENCE
            self.send("net", frame(Protocol.UDP, end(source, port), end(to, port), Segment(data=number)))
            while (got := self._receive()).raw[42:50] != number or got.device != "tunnel":
                found.append(got)
        return found

    def _receive(self) -> Received:
        while True:
            try:
                raw, (peer, *_) = self._receiver.recvfrom(1 << 16)
            except BlockingIOError:
                if not select.select([self._receiver], [], [], _PATIENCE)[0]:
                    raise TimeoutError("the node did not forward the test's fence packet") from None
                continue
            if not _is_neighbor_discovery(raw):
                return Received(peer.removesuffix("-peer"), raw)


def _is_neighbor_discovery(raw: bytes) -> bool:
    """Packets that the node sends by itself: ARP, and ICMPv6 of the types 130 to 143, such as multicast
    listener reports after a hop-by-hop header."""
    if raw[12:14] == b"\x08\x06":
        return True
    v6 = raw[12:14] == b"\x86\xdd"
    at = 62 if v6 and raw[20:21] == b"\0" else 54
    is_icmp = v6 and 58 in raw[20:21] + raw[54:55]
    return is_icmp and len(raw) > at and 130 <= raw[at] <= 143


class DevicePath:
    """Like `PacketPath` for conversations, but forwarded packets use the devices."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires

    def ingress(self, packet: bytes, device: str) -> Outcome:
        """The packet that leaves the node."""
        return self._sent(packet, device, tuple(DEVICES))

    def forward(self, packet: bytes, device: str, to: str) -> Outcome:
        """Send a packet in at `device`; the packet that leaves at `to`. SHOT: none did."""
        return self._sent(packet, device, (to,))

    def _sent(self, packet: bytes, device: str, to: Sequence[str]) -> Outcome:
        self.wires.send(device, packet)
        found = self.wires.drain()
        if not found:
            found = self.wires.drain(_PASSES)
        for got in found:
            if got.device in to:
                return Outcome(UNSPEC, got.raw, 0)
        return Outcome(SHOT, packet, 0)


@contextlib.contextmanager
def wires() -> Iterator[Wires]:
    """Within the block, the devices are connected. The calling thread is in their namespace and on one
    CPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_cpu())
        beyond = stack.enter_context(namespace("wires"))
        _lay(beyond)
        with beyond.entered():
            everything = socket.htons(_ALL)
            receiver = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, everything))
            receiver.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
            receiver.setsockopt(socket.SOL_SOCKET, _FORCE_BUFFER, _BUFFER)
            receiver.setblocking(False)
            sockets = {name: stack.enter_context(_sender(f"{name}-peer")) for name in DEVICES}
        yield Wires(sockets, receiver, beyond)


def _sender(device: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    made.bind((device, 0))
    return made


@contextlib.contextmanager
def _one_cpu() -> Iterator[None]:
    """Frames that one CPU sends through veth pairs are processed by that CPU in order (netif_rx())."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _lay(beyond: Namespace) -> None:
    """Move the peers to the namespace; route all packets to permanent neighbors."""
    _sysctl("ipv4/conf/all/send_redirects", "0")
    with beyond.entered():
        for name in ("all", "default"):
            _sysctl(f"ipv6/conf/{name}/disable_ipv6", "1")
    lines = []
    for name, (v4, v6) in _WAYS.items():
        for switch in ("rp_filter", "send_redirects"):
            _sysctl(f"ipv4/conf/{name}/{switch}", "0")
        lines += [
            f"link set {name}-peer netns {beyond.name}",
            f"link set {name} up",
            f"neigh replace 169.254.1.1 lladdr {THERE} dev {name} nud permanent",
            f"neigh replace fe80::77 lladdr {THERE} dev {name} nud permanent",
            f"route replace {v4} via 169.254.1.1 dev {name} onlink",
            f"-6 route replace {v6} via fe80::77 dev {name} onlink",
        ]
    beyond_lines = [f"link set {name}-peer up" for name in _WAYS]
    _ip(lines[::6])
    beyond.ip(*beyond_lines)
    _ip([line.removeprefix("-6 ") for at, line in enumerate(lines) if at % 6])


def _ip(lines: Sequence[str]) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _sysctl(name: str, value: str) -> None:
    Path("/proc/sys/net", name).write_text(value)


class Around(NamedTuple):
    """Foreign programs at both sides of every device; `by_tcx`: how the agent's programs are attached."""

    by_tcx: bool
    others: tuple[tuple[Way, int, int, Mapping[str, int]], ...] = ()
    """Way to attach, HEAD or TAIL, verdict, and the written fields."""
    came_first: bool = False
    """The agent's programs return to the first position after all others are attached."""


@contextlib.contextmanager
def attached(path: PacketPath, pins: Path, around: Around) -> Iterator[None]:
    """Within the block, the agent's and the foreign programs are attached at both sides of every device."""
    with contextlib.ExitStack() as stack:
        for name, ifindex in path.indices.items():
            for side, own in ((Side.INGRESS, "from_any"), (Side.EGRESS, "to_any")):
                pin = pins / f"{name}_{side.name}"
                stack.callback(tcx.detach, pin)
                stack.callback(tc.detach, ifindex, side)
                _attach(path.program(own), ifindex, side, pin if around.by_tcx else None)
                for way, where, verdict, writes in around.others:
                    foreign = stack.enter_context(program(verdict, **writes))
                    stack.enter_context(way(ifindex, side, foreign, where))
                if around.came_first:
                    _attach(path.program(own), ifindex, side, pin if around.by_tcx else None)
        yield


def _attach(own: Program, ifindex: int, side: Side, pin: Path | None) -> None:
    """Attach by a tcx link that is pinned at `pin`; None: by a filter."""
    if pin:
        tcx.attach(ifindex, side, own, pin)
    else:
        tc.attach(ifindex, side, own)
