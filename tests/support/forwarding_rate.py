"""Measures how many packets per second the node forwards for one flow, by tc and by XDP, on veth devices.

    python -m tests.support.forwarding_rate [--packets=N] [--rounds=N]

The kernel sends the frames by itself (BPF_F_TEST_XDP_LIVE_FRAMES, Linux 5.18): an XDP program writes the
client's packet and sends it to the uplink. Everything up to the peer of the output device, which drops the
frame, runs on one CPU. So the rate is the inverse of the cost of one packet, with the cost of its creation
and of two veth devices. Needs root.
"""

import argparse
import contextlib
import ctypes
import statistics
import struct
import time
from collections.abc import Iterator

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.bpf.bpf import Link, Program
from ebpfproxy.linux.bpf.xdp import Mode
from ebpfproxy.linux.netlink import xdp as netlink_xdp
from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path.conversation import request
from tests.kernel.packet_path.test_packet_xdp_devices import Node
from tests.support.bpf_place import bpf_place
from tests.support.device_path import Around, Wires, attached, wires
from tests.support.packet_path import packet_path
from tests.support.packets import V4, V6, Places

_XDP, _ATTACH_TYPE, _NATIVE = 6, 37, 1 << 2
_LIVE_FRAMES, _BATCH = 1 << 1, 64
_WRITTEN = 64  # bytes of a frame: all headers
_DROP, _TX = 1, 3  # XDP_*


def _instruction(code: int, to: int = 0, source: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
    numbers = offset.to_bytes(2, "little", signed=True) + immediate.to_bytes(4, "little", signed=True)
    return bytes((code, source << 4 | to)) + numbers


def _sender(frame: bytes) -> Program:
    """Writes the headers, which the previous run of a recycled frame has translated, and sends the frame."""
    words = struct.unpack(f"={_WRITTEN // 4}i", frame[:_WRITTEN])
    stores = b"".join(_instruction(0x62, 2, offset=4 * at, immediate=word) for at, word in enumerate(words))
    code = (
        _instruction(0x61, 2, 1, 0)  # r2 = data
        + _instruction(0x61, 3, 1, 4)  # r3 = data_end
        + _instruction(0xBF, 4, 2)
        + _instruction(0x07, 4, immediate=_WRITTEN)
        + _instruction(0x2D, 4, 3, offset=len(stores) // 8)  # if r4 > r3, write nothing
        + stores
        + _instruction(0xB7, 0, immediate=_TX)
        + _instruction(0x95)
    )
    return Program.load(_XDP, _ATTACH_TYPE, code, "sender")


def _send(sender: Program, ifindex: int, frame: bytes, count: int) -> None:
    """Send `count` frames from the device, in this thread."""
    data = ctypes.create_string_buffer(frame, len(frame))
    context = ctypes.create_string_buffer(struct.pack("=6I", 0, len(frame), 0, ifindex, 0, 0), 24)
    sizes = struct.pack("=IIII", sender.fd, 0, len(frame), 0)
    test = struct.pack(
        "=QQIIIIQQIII4x",
        *(ctypes.addressof(data), 0, count, 0, 24, 0),
        *(ctypes.addressof(context), 0, _LIVE_FRAMES, 0, _BATCH),
    )
    bpf.bpf(bpf.PROG_TEST_RUN, sizes + test, "cannot send frames")


@contextlib.contextmanager
def _dropped(connected: Wires) -> Iterator[dict[str, int]]:
    """Within the block, the peers of the devices drop all frames. Their ifindexes by the device's name."""
    with contextlib.ExitStack() as stack:
        code = _instruction(0xB7, 0, immediate=_DROP) + _instruction(0x95)
        program = Program.load(_XDP, _ATTACH_TYPE, code, "drop")
        stack.callback(program.close)
        with connected.beyond.entered():
            peers = {each.name: ifindex for ifindex, each in netlink_xdp.devices().items()}
            link = Link.create_xdp(program, peers["tunnel-peer"], _NATIVE)
        stack.callback(link.close)
        stack.callback(link.detach)
        yield peers


def _measure(node: Node, at: Places, packets: int, rounds: int) -> dict[str, list[float]]:
    """Packets per second by way, of each round. The ways alternate."""
    frame = bytes(request(at, Protocol.TCP, flags="PA", data=bytes(64)))
    rates: dict[str, list[float]] = {"tc": [], "xdp native": [], "xdp generic": []}
    for _ in range(rounds):
        for name, mode in (("tc", None), ("xdp native", Mode.NATIVE), ("xdp generic", Mode.GENERIC)):
            node.path.forget_flows()
            node.use(None)
            node.establish(at, Protocol.TCP, at.there, "tunnel")
            node.use(mode)
            with _dropped(node.wires) as peers, contextlib.closing(_sender(frame)) as sender:
                node.use(mode)
                node.path.counted()
                with node.wires.beyond.entered():
                    begun = time.monotonic()
                    _send(sender, peers["net-peer"], frame, packets)
                    rates[name].append(packets / (time.monotonic() - begun))
            counted = node.path.counted()
            most = "xdp_forwarded" if mode else "redirected"
            assert counted.get(most, 0) > 0.9 * packets, (name, counted)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--packets", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with (
        bpf_place() as place,
        packet_path(place, at_devices=True) as path,
        wires() as connected,
    ):
        connected.accept_xdp_frames()
        path.start_over()
        path.set_node(abi.NODE_REDIRECT)
        with attached(path, place.bpffs, Around(by_tcx=True)):
            node = Node(path, connected, place.bpffs / "xdp")
            for name, at in (("IPv4", V4), ("IPv6", V6)):
                for way, rates in _measure(node, at, options.packets, options.rounds).items():
                    middle = statistics.median(rates)
                    low, high = min(rates) / 1e3, max(rates) / 1e3
                    print(f"{name}  {way:<12} {middle / 1e3:8.0f} kpps ({low:.0f} to {high:.0f})", end="  ")
                    print(f"{1e9 / middle:6.0f} ns", flush=True)
            node.use(None)


if __name__ == "__main__":
    main()
