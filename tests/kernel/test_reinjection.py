"""The reinjection veth pair in a separate namespace: creation, repair, and the packets that it accepts."""

import json
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.errors import AlreadyExists
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import reinjection
from tests.kernel.cluster import eventually
from tests.kernel.loopback import add_addresses
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel


@pytest.fixture
def node() -> Iterator[Namespace]:
    """A namespace with loopback up; the calling thread is in it."""
    with namespace("inner") as made:
        made.ip("link set lo up")
        with made.entered():
            yield made


def shown(node: Namespace) -> dict[str, dict[str, Any]]:
    """The output of ip(8) for each device except loopback, with its addresses."""
    command = ["ip", "-n", node.name, "-json", "-details", "address", "show"]
    devices = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {device["ifname"]: device for device in devices if device["ifname"] != "lo"}


def settings(device: str = reinjection.DEVICE) -> dict[str, str]:
    return {name: sysctl.read(f"net/ipv4/conf/{device}/{name}") for name in reinjection.SYSCTLS}


def is_configured(node: Namespace) -> bool:
    found = shown(node)
    inner, outer = found["ebpfproxy0"], found["ebpfproxy1"]
    return (
        inner["address"] == "02:eb:bf:00:00:01"
        and (inner["link"], outer["link"]) == ("ebpfproxy1", "ebpfproxy0")
        and all("UP" in end["flags"] and end["mtu"] == 65535 for end in (inner, outer))
        and [(one["local"], one["scope"]) for one in inner["addr_info"]] == [("127.235.0.1", "host")]
        and outer["addr_info"] == []
        and {sysctl.read(f"net/ipv6/conf/{name}/addr_gen_mode") for name in found} == {"1"}
        and settings() == {"rp_filter": "2", "accept_local": "1", "route_localnet": "1"}
    )


class Changes:
    """Whether the kernel sends notifications about devices within the block."""

    def __enter__(self) -> "Changes":
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.bind((0, 1))  # RTMGRP_LINK
        self._socket.setblocking(False)
        return self

    def any(self) -> bool:
        try:
            return bool(self._socket.recv(64))
        except BlockingIOError:
            return False

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_the_pair_is_created_up_and_configured(node: Namespace) -> None:
    index = reinjection.ensure_pair()
    assert index == socket.if_nametoindex("ebpfproxy0")
    assert is_configured(node)


def test_an_existing_pair_is_not_changed(node: Namespace) -> None:
    index = reinjection.ensure_pair()
    eventually(
        lambda: {end["operstate"] for end in shown(node).values()} == {"UP"}, "the kernel sees the link"
    )
    node.ip("link set lo up")  # takes the lock under which the kernel notifies, so that it has done so
    with Changes() as changes:
        assert reinjection.ensure_pair() == index
        assert not changes.any()


@pytest.mark.parametrize(
    "damage",
    [
        "link set ebpfproxy0 down",
        "link set ebpfproxy1 down",
        "link set ebpfproxy0 mtu 1500",
        "link set ebpfproxy1 mtu 1500",
        "link set ebpfproxy0 address 02:00:00:00:00:07",
        "addr flush dev ebpfproxy0",
    ],
)
def test_a_changed_setting_is_repaired_in_place(node: Namespace, damage: str) -> None:
    index = reinjection.ensure_pair()
    node.ip(damage)
    assert not is_configured(node)
    assert reinjection.ensure_pair() == index
    assert is_configured(node)


@pytest.mark.parametrize("name", reinjection.SYSCTLS)
def test_a_reset_sysctl_is_repaired(node: Namespace, name: str) -> None:
    """systemd-udevd resets rp_filter of a device that is new to it (50-default.conf)."""
    reinjection.ensure_pair()
    sysctl.ensure(f"net/ipv4/conf/ebpfproxy0/{name}", "0")
    reinjection.ensure_pair()
    assert is_configured(node)


@pytest.mark.parametrize(
    "remains",
    [
        ["link add ebpfproxy0 type veth peer name other"],
        ["link add ebpfproxy1 type veth peer name other"],
        [
            "link add ebpfproxy0 type veth peer name other",
            "link add ebpfproxy1 type veth peer name another",
        ],
    ],
    ids=["inner", "outer", "both"],
)
def test_ends_of_other_pairs_are_replaced(node: Namespace, remains: list[str]) -> None:
    node.ip(*remains)
    reinjection.ensure_pair()
    assert is_configured(node)
    assert set(shown(node)) == {"ebpfproxy0", "ebpfproxy1"}


def test_a_pair_with_one_end_moved_to_another_namespace_is_recreated(node: Namespace) -> None:
    """Its index in the other namespace may equal the index of ebpfproxy1 in this one."""
    reinjection.ensure_pair()
    with namespace("inner-other") as other:
        index = shown(node)["ebpfproxy1"]["ifindex"]
        node.ip(f"link set ebpfproxy1 netns {other.name}")
        node.ip(f"link add ebpfproxy1 index {index} type veth peer name stray")
        reinjection.ensure_pair()
        assert is_configured(node)


@pytest.mark.parametrize("name", ["ebpfproxy0", "ebpfproxy1"])
def test_a_device_of_another_kind_with_one_of_the_names_is_not_touched(node: Namespace, name: str) -> None:
    node.ip(f"link add {name} type bridge")
    with pytest.raises(AlreadyExists, match=f"{name} is another program's, of kind bridge"):
        reinjection.ensure_pair()
    assert reinjection.remove_pair() is False
    assert set(shown(node)) == {name}


def test_removing_twice_removes_once(node: Namespace) -> None:
    assert reinjection.remove_pair() is False
    reinjection.ensure_pair()
    assert reinjection.remove_pair() is True
    assert shown(node) == {}
    assert reinjection.remove_pair() is False


def test_a_single_remaining_end_is_removed(node: Namespace) -> None:
    node.ip("link add ebpfproxy1 type veth peer name stray")
    assert reinjection.remove_pair() is True
    assert shown(node) == {}


def test_the_pair_is_created_in_the_calling_threads_namespace(node: Namespace) -> None:
    with namespace("inner-other") as other:

        def make() -> None:
            with other.entered():
                reinjection.ensure_pair()

        thread = threading.Thread(target=make)
        thread.start()
        thread.join(10)
        assert shown(node) == {}
        assert set(shown(other)) == {"ebpfproxy0", "ebpfproxy1"}


@pytest.mark.parametrize(
    "source",
    ["10.96.0.10", "10.255.21.1", "127.0.0.1"],
    ids=["a ClusterIP", "the node itself", "localhost"],
)
def test_a_packet_with_a_source_that_rp_filter_rejects_elsewhere_arrives(
    node: Namespace, source: str
) -> None:
    """With the strict reverse path filter for all devices, the default of many distributions."""
    node.ip("link add n0 type veth peer name n1", "addr add 10.255.21.1/24 dev n0")
    node.ip("link set n0 up", "link set n1 up", "route add default via 10.255.21.254")
    for scope in ("all", "default"):
        sysctl.ensure(f"net/ipv4/conf/{scope}/rp_filter", "1")
    reinjection.ensure_pair()
    destination = "127.0.0.1" if source == "127.0.0.1" else "10.255.21.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as arriving:
        arriving.bind((destination, 7))
        arriving.settimeout(5)
        send_by("ebpfproxy1", reinjection.MAC, source, destination)
        assert arriving.recvfrom(100) == (b"hello", (source, 80))


def test_such_a_packet_does_not_arrive_at_another_device(node: Namespace) -> None:
    """The control of the test above: this machine's kernel does filter."""
    node.ip("link add n0 type veth peer name n1", "link set n0 address 02:00:00:00:21:01")
    node.ip("addr add 10.255.21.1/24 dev n0", "link set n0 up", "link set n1 up")
    reinjection.ensure_pair()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as arriving:
        arriving.bind(("10.255.21.1", 7))
        arriving.settimeout(5)
        send_by("n1", bytes.fromhex("020000002101"), "10.255.21.1", "10.255.21.1")
        node.ip("route add default via 10.255.21.254")
        send_by("ebpfproxy1", reinjection.MAC, "10.96.0.10", "10.255.21.1")
        assert arriving.recvfrom(100) == (b"hello", ("10.96.0.10", 80))


@pytest.mark.parametrize("source", ["fd00:96::10", "fd00:21::1"], ids=["a ClusterIP", "the node itself"])
def test_ipv6_packets_arrive_although_the_pair_has_no_link_local_address(
    node: Namespace, source: str
) -> None:
    add_addresses("fd00:21::1")
    reinjection.ensure_pair()
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as arriving:
        arriving.bind(("fd00:21::1", 7))
        arriving.settimeout(5)
        send_by("ebpfproxy1", reinjection.MAC, source, "fd00:21::1")
        assert arriving.recvfrom(100) == (b"hello", (source, 80, 0, 0))


def send_by(device: str, mac: bytes, source: str, destination: str) -> None:
    """Send one UDP packet with an Ethernet header from port 80 to port 7 through a device."""
    family, kind = (socket.AF_INET6, 0x86DD) if ":" in source else (socket.AF_INET, 0x0800)
    addresses = socket.inet_pton(family, source) + socket.inet_pton(family, destination)
    udp = struct.pack("!HHHH", 80, 7, 8 + len(b"hello"), 0) + b"hello"
    total = checksum(addresses + struct.pack("!HH", socket.IPPROTO_UDP, len(udp)) + udp)
    udp = udp[:6] + struct.pack("!H", total) + udp[8:]
    if family == socket.AF_INET6:
        head = struct.pack("!IHBB", 6 << 28, len(udp), socket.IPPROTO_UDP, 64) + addresses
    else:
        head = struct.pack("!BBHIBBH", 0x45, 0, 20 + len(udp), 0, 64, socket.IPPROTO_UDP, 0) + addresses
        head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind((device, kind))
        raw.send(mac + bytes(6) + struct.pack("!H", kind) + head + udp)


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    padded = data + bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF
