"""Replies by the node itself: to pings of frontends, and errors for Services without endpoints."""

import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import ICMP, IP
from scapy.layers.inet6 import ICMPv6EchoRequest, IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from ebpfproxy.errors import NotFound
from ebpfproxy.lab import Pod
from ebpfproxy.linux import sysctl
from tests.kernel.clients import SILENT, UDP, ping
from tests.kernel.cluster import Exposed, elsewhere, eventually
from tests.kernel.differences import DIFFERENCES
from tests.kernel.floods.testbed import Target, both_families, in_modes
from tests.support.flood import Sender, Size

pytestmark = pytest.mark.kernel

UNUSED_MAC = "02:00:00:00:00:99"
"""An Ethernet address that no device has."""
ERRORS = Size(packets=20_000, rate=40_000)
"""Datagrams to a Service without endpoints: many times more than the limit of errors."""
SLACK = 1.25
"""A tolerance factor for the time in which errors are sent: the kernel measures it in ticks."""


def _echo(source: str, destination: str, number: int) -> Packet:
    """An echo request."""
    message: Packet
    if ":" in destination:
        message = IPv6(src=source, dst=destination) / ICMPv6EchoRequest(id=number, data=b"ping")
    else:
        message = IP(src=source, dst=destination) / ICMP(id=number) / Raw(b"ping")
    return message


def _answered(netns: Pod, frames: Sequence[Packet], last: int) -> set[int]:
    """The numbers of the echo requests that are answered. `last` is the number of the last request, whose
    answer comes after all others."""
    raw = [bytes(frame) for frame in frames]
    v6 = IPv6 in frames[0]
    kind, at = (0x86DD, 54) if v6 else (0x0800, 34)
    reply = 129 if v6 else 0

    def exchange() -> set[int]:
        found: set[int] = set()
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(kind)) as sock:
            sock.bind(("eth0", kind))
            sock.settimeout(10.0)
            for frame in raw:
                sock.send(frame)
            while last not in found:
                frame, (_, _, direction, *_) = sock.recvfrom(1 << 16)
                protocol = frame[20] if v6 else frame[23]
                is_reply = protocol == (58 if v6 else 1) and frame[at] == reply
                if direction == socket.PACKET_HOST and is_reply:
                    found.add(int(struct.unpack_from("!H", frame, at + 4)[0]))
        return found

    return netns.call(exchange)


@both_families
@in_modes()
def test_a_ping_for_another_host_is_not_answered(target: Target, family: str) -> None:
    """A device in promiscuous mode, or a port of a bridge, sees frames for other hosts (PACKET_OTHERHOST)."""
    web, outside = target.service().to(target.a), target.lab.outside
    source, frontend = getattr(outside, family), web.address(family)
    own, node = _hardware_address(outside), _hardware_address(target.node)
    frames = [
        Ether(src=own, dst=UNUSED_MAC) / _echo(source, frontend, 1),
        Ether(src=own, dst=node) / _echo(source, frontend, 2),
        # The node's own address is answered in every mode, last.
        Ether(src=own, dst=node) / _echo(source, getattr(target.node, family), 3),
    ]
    answered = _answered(outside, frames, last=3)
    assert answered == ({2, 3} if DIFFERENCES[target.mode].answers_pings else {3})


def _hardware_address(netns: Pod) -> str:
    """The Ethernet address of eth0 in this network namespace."""
    words = netns.run(["ip", "-o", "link", "show", "dev", "eth0"]).stdout.split()
    return words[words.index("link/ether") + 1]


@both_families
@in_modes(ipvs_lacks="kube-ipvs0 has the addresses of all Services, as with kube-proxy")
def test_a_ping_of_a_load_balancer_address_is_answered_only_with_local_endpoints(
    target: Target, family: str
) -> None:
    """With externalTrafficPolicy Local a node without an endpoint drops packets of external clients, so it
    does not answer their pings either."""
    web = _load_balancer(target, externalTrafficPolicy="Local")
    address = web.status["loadBalancer"]["ingress"][family == "v6"]["ip"]
    answers = DIFFERENCES[target.mode].answers_pings
    web.to(elsewhere(target.c))
    assert ping(target.lab.outside, address, timeout=0.3) == SILENT
    web.to(target.a, elsewhere(target.c))
    assert ping(target.lab.outside, address, timeout=1.0 if answers else 0.3) == (
        address if answers else SILENT
    )


def _load_balancer(target: Target, **spec: Any) -> Exposed:
    web = target.service(type="LoadBalancer", **spec)
    number = int(web.name.removeprefix("svc-"))
    addresses = f"10.99.{number >> 8}.{number & 255}", f"fd00:10:96:2::{number:x}"
    web.status = {"loadBalancer": {"ingress": [{"ip": address} for address in addresses]}}
    return web


@both_families
@in_modes()
def test_icmp_errors_obey_the_kernels_limit(target: Target, sender: Sender, family: str) -> None:
    """net.ipv4.icmp_msgs_per_sec and icmp_msgs_burst limit errors of both families (icmp_global_allow()).
    There are so many clients that the limit per client does not matter (net.ipv4.icmp_ratelimit)."""
    web, outside = target.service().to(), target.lab.outside
    rate, burst = (_limit(target.node, name) for name in ("per_sec", "burst"))
    before = outside.call(_received)
    took = sender.finish(sender.start(outside, UDP, web.address(family), 53, ERRORS))
    eventually(lambda: outside.call(_received) - before >= burst / 2, "errors come", 10.0)
    came = outside.call(_received) - before
    print(f"{came} errors in {took} s; {rate} a second, burst {burst}")
    assert came <= burst + SLACK * rate * took + 10  # frames of other kinds
    assert came >= burst / 2


def _limit(node: Pod, name: str) -> int:
    """The limit of the node. On kernels where only the initial namespace has it, it applies to all of
    them."""

    def read() -> str:
        return sysctl.read(f"net/ipv4/icmp_msgs_{name}")

    try:
        return int(node.call(read))
    except NotFound:
        return int(read())


def _received() -> int:
    """Frames that eth0 of the calling process's network namespace has received."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[1]) for line in lines if line.strip().startswith("eth0:"))
