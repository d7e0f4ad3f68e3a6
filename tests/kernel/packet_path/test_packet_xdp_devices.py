"""The XDP program at real devices: frames arrive at one device and leave by another, or by the same one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scapy.packet import Packet

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.devices.xdp import XdpDevices
from ebpfproxy.backends.ebpf.entries import DeviceEntry
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.xdp import Mode
from ebpfproxy.model.address import Family, Protocol, unspecified
from tests.kernel.packet_path.conversation import answer, request
from tests.kernel.packet_path.served import TCP, UDP, families, serve
from tests.support import xdp_path
from tests.support.bpf_place import bpf_place
from tests.support.device_path import Around, DevicePath, Received, Wires, attached, wires
from tests.support.packet_path import SHOT, Outcome, PacketPath, packet_path
from tests.support.packets import Places
from tests.support.xdp_path import SENT, seen_now

pytestmark = pytest.mark.kernel

UPLINKS = ("net", "tunnel")
protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
modes = pytest.mark.parametrize("mode", list(Mode))


class _Loaded:
    """See `XdpProgram`."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def xdp(self) -> Program:
        return self._program


class Node:
    """The node with all programs attached."""

    def __init__(self, path: PacketPath, connected: Wires, folder: Path) -> None:
        self.path, self.wires, self._folder = path, connected, folder

    def use(self, mode: Mode | None) -> None:
        """Attach the XDP program to the uplinks, as the agent does."""
        entry = DeviceEntry(0, unspecified(Family.IPV4), unspecified(Family.IPV6), ())
        loaded = _Loaded(self.path.program(xdp_path.XDP))
        devices = XdpDevices(self.path.maps["xdp_devices"], loaded, self._folder, mode, {})
        for _ in range(2):  # the second time, the devices have their features with the program
            devices.sync((self.path.indices[name], entry) for name in UPLINKS)

    def establish(self, at: Places, protocol: Protocol, endpoint: str, towards: str) -> Outcome:
        """A flow, by packets through the devices; the first packet, as the endpoint got it."""
        serve(self.path, at, endpoint)
        by_devices = DevicePath(self.wires)
        got = by_devices.forward(bytes(request(at, protocol)), "net", towards)
        assert got.verdict != SHOT
        by_devices.forward(bytes(answer(got)), towards, "net")
        by_devices.forward(bytes(_next(at, protocol)), "net", towards)
        return got

    def forwarded(self, packet: Packet, device: str, counter: str) -> Received:
        """The frame that leaves the node after this one arrived in a second in which the flow was seen. Only
        `counter` counts it."""

        def send() -> tuple[list[Received], dict[str, int]]:
            self.path.counted()
            self.wires.send(device, bytes(packet))
            return self.wires.drain(4), self.path.counted()

        (got,), counted = seen_now(self.path, send, lambda result: counter not in result[1])
        assert counted == {counter: 1}
        return got


def _next(at: Places, protocol: Protocol) -> Packet:
    fields: dict[str, Any] = {"flags": "A"} if protocol is TCP else {}
    return request(at, protocol, **fields)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with (
        bpf_place() as place,
        packet_path(place, at_devices=True) as path,
        wires() as connected,
        contextlib.ExitStack() as stack,
    ):
        connected.accept_xdp_frames()
        path.start_over()
        path.set_node(abi.NODE_REDIRECT)
        stack.enter_context(attached(path, place.bpffs, Around(by_tcx=False)))
        made = Node(path, connected, place.bpffs / "xdp")
        yield made
        made.use(None)


@modes
@families
@protocols
@pytest.mark.parametrize("towards", ["tunnel", "net"])
def test_frames_leave_by_the_output_device_as_by_tc(
    node: Node, mode: Mode, at: Places, protocol: Protocol, towards: str
) -> None:
    """`towards` net: by the device at which they arrived."""
    node.use(None)
    node.path.forget_flows()
    endpoint = at.there if towards == "tunnel" else xdp_path.BEYOND[at]
    got = node.establish(at, protocol, endpoint, towards)
    fields: dict[str, Any] = {"flags": "PA"} if protocol is TCP else {}
    packets = [(request(at, protocol, **fields), "net", towards), (answer(got, **fields), towards, "net")]
    by_tc = [node.forwarded(packet, device, "redirected") for packet, device, _ in packets]
    assert [each.device for each in by_tc] == [to for *_, to in packets]
    node.use(mode)
    by_xdp = [node.forwarded(packet, device, "xdp_forwarded") for packet, device, _ in packets]
    assert by_xdp == by_tc
    assert all(each.raw[:12] == SENT for each in by_xdp)
