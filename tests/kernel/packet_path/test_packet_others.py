"""The self-check that packets reach the classifiers, with another program that diverts them."""

import os
import socket
import struct

import pytest

from ebpfproxy.backends.ebpf.devices.packet_check import LEAST, PacketCheck, slot
from ebpfproxy.linux.bpf import tcx
from ebpfproxy.linux.bpf.tc import Side
from tests.kernel.cluster import eventually
from tests.kernel.others import PASS, linked, program
from tests.kernel.packet_path.conversation import request
from tests.kernel.packet_path.served import serve
from tests.support.packet_path import PacketPath
from tests.support.packets import V4

pytestmark = pytest.mark.kernel

TCX = pytest.mark.skipif(os.geteuid() != 0 or not tcx.is_supported(), reason="this kernel has no tcx")


def counted(path: PacketPath) -> int:
    """Packets that reached the program at ingress of `net`."""
    value = path.maps["device_packets"].lookup(slot(path.indices["net"], "ingress").to_bytes(4, "little"))
    return sum(struct.unpack(f"={len(value or b'') // 8}Q", value or b""))


def send(sock: socket.socket, packets: int = 2 * LEAST) -> None:
    frame = bytes(request(V4, flags="S"))
    for _ in range(packets):
        sock.send(frame)


@TCX
def test_packets_that_bypass_the_filter_through_another_program_are_reported(path: PacketPath) -> None:
    """The other program is attached by tcx, and the own one is a filter, which then sees no packet."""
    net = path.indices["net"]
    serve(path, V4, V4.there)
    check = PacketCheck(path.folder, lambda: {(net, "ingress", "net")}, interval=0.1)
    try:
        with path.wire("net") as sock, program(PASS) as foreign:

            def reported() -> bool:
                """Whether trouble is reported after more packets."""
                send(sock)
                return bool(check.troubles())

            with linked(net, Side.INGRESS, foreign):
                before = counted(path)  # until now the kernel's own packets (MLD) reached the filter
                eventually(reported, "it is reported")
                (trouble,) = check.troubles()
                assert (trouble.device, trouble.side, trouble.unreached) == ("net", "ingress", True)
                assert counted(path) == before
            eventually(lambda: not reported(), "it is no longer reported")
            assert counted(path) > before
    finally:
        check.close()
