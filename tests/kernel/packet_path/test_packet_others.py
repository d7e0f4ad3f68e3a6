"""The self-check that packets reach the classifiers, where a program of others keeps them away."""

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
def test_packets_that_a_program_before_ours_passes_to_the_node_are_found_missing(path: PacketPath) -> None:
    """The program of others is in the list of tcx, ours a filter: it never sees a packet."""
    net = path.indices["net"]
    serve(path, V4, V4.there)
    check = PacketCheck(path.folder, lambda: {(net, "ingress", "net")}, interval=0.1)
    try:
        with path.wire("net") as sock, program(PASS) as theirs:

            def reported() -> bool:
                """After some more packets."""
                send(sock)
                return bool(check.troubles())

            with linked(net, Side.INGRESS, theirs):
                before = counted(path)  # until now the kernel's own packets (MLD) reached ours
                eventually(reported, "it is reported")
                (trouble,) = check.troubles()
                assert (trouble.device, trouble.side, trouble.unreached) == ("net", "ingress", True)
                assert counted(path) == before
            eventually(lambda: not reported(), "it is over")
            assert counted(path) > before
    finally:
        check.close()
