"""Devices, decoded from the kernel's messages."""

import errno
import itertools
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import links, netlink, rtnetlink, rtnetlink_watch
from ebpfproxy.model.address import format_address
from ebpfproxy.model.device import Device

INET, INET6 = 2, 10
SECONDARY, OPTIMISTIC, DADFAILED, DEPRECATED, TENTATIVE = 0x01, 0x04, 0x08, 0x20, 0x40


def number(value: int) -> bytes:
    return struct.pack("=I", value)


def link(index: int, name: str, kind: str = "", master: int = 0, up: bool = True, type_: int = 1) -> bytes:
    head = struct.pack("=BxHiII", 0, type_, index, int(up), 0)
    message = head + netlink.attribute(3, name.encode() + b"\0")
    if master:
        message += netlink.attribute(10, number(master))
    if kind:  # IFLA_LINKINFO, with NLA_F_NESTED as new kernels say it
        message += netlink.attribute(18 | 0x8000, netlink.attribute(1, kind.encode() + b"\0"))
    return message


def address(index: int, raw: bytes, flags: int = 0, scope: int = 0) -> bytes:
    family = INET if len(raw) == 4 else INET6
    head = struct.pack("=BBBBI", family, 24, flags & 0xFF, scope, index)
    return head + netlink.attribute(1, raw) + netlink.attribute(8, number(flags))


def route(
    *attributes: bytes,
    family: int = INET,
    length: int = 0,
    table: int = 254,
    kind: int = 1,
    protocol: int = 3,
) -> bytes:
    head = struct.pack("=BBBBBBBBI", family, length, 0, 0, table, protocol, 0, kind, 0)
    return head + b"".join(attributes)


def hop(index: int, gateway: bytes) -> bytes:
    attributes = netlink.attribute(5, gateway)
    return struct.pack("=HBBi", 8 + len(attributes), 0, 0, index) + attributes


DST, OIF, GATEWAY, PREFSRC, MULTIPATH, TABLE, VIA = 1, 4, 5, 7, 9, 15, 18


def devices(found: list[bytes], *addresses: bytes) -> tuple[Device, ...]:
    return links.devices(map(rtnetlink.link, found), rtnetlink.decoded_addresses(addresses))


def default_devices(*routes: bytes) -> set[int]:
    return links.default_devices(map(rtnetlink.route, routes))


def owned(*messages: bytes) -> list[str]:
    (device,) = devices([link(1, "n0")], *messages)
    return [format_address(one) for one in device.addresses]


def test_a_device_is_decoded_from_its_message_with_the_kind_of_its_master() -> None:
    found = devices([link(7, "eth0", master=3, up=False), link(3, "br0", "bridge")])
    assert found == (
        Device(3, "br0", "bridge", 1, True),
        Device(7, "eth0", "", 1, False, 3, "bridge"),
    )


def test_a_missing_master_has_no_kind() -> None:
    assert devices([link(7, "eth0", master=3)]) == (Device(7, "eth0", "", 1, True, 3, ""),)


def test_addresses_of_a_missing_device_are_ignored() -> None:
    assert devices([], address(9, bytes([10, 0, 0, 1]))) == ()


def test_addresses_are_sorted_by_preference_and_unusable_ones_are_skipped() -> None:
    assert owned(
        address(1, bytes([10, 0, 0, 4]), DEPRECATED | SECONDARY),
        address(1, bytes([10, 0, 0, 3]), DEPRECATED),
        address(1, bytes([10, 0, 0, 2]), SECONDARY),
        address(1, bytes([10, 0, 0, 1])),
        address(1, bytes([10, 0, 0, 9]), scope=253),  # link
        address(1, bytes([127, 0, 0, 1]), scope=254),  # host
        address(1, b"\xfd" + bytes(14) + b"\7", TENTATIVE),
        address(1, b"\xfd" + bytes(14) + b"\6", DADFAILED | TENTATIVE | OPTIMISTIC),
        address(1, b"\xfd" + bytes(14) + b"\5", TENTATIVE | OPTIMISTIC),
    ) == ["10.0.0.1", "fd00::5", "10.0.0.2", "10.0.0.3", "10.0.0.4"]


def test_on_a_point_to_point_device_the_local_address_is_used() -> None:
    local = netlink.attribute(2, bytes([10, 0, 0, 1]))
    assert owned(address(1, bytes([10, 0, 0, 9])) + local) == ["10.0.0.1"]


def test_default_routes_use_their_device_or_each_of_their_hops() -> None:
    assert default_devices(
        route(netlink.attribute(OIF, number(4))),
        route(netlink.attribute(MULTIPATH, hop(5, bytes(4)) + hop(6, bytes(16)))),
        route(netlink.attribute(OIF, number(7)), netlink.attribute(TABLE, number(254)), family=INET6),
    ) == {4, 5, 6, 7}


def test_other_routes_and_other_tables_do_not_count() -> None:
    oif = netlink.attribute(OIF, number(4))
    assert (
        default_devices(
            route(oif, length=8),
            route(oif, table=255),
            route(oif, netlink.attribute(TABLE, number(1000)), table=252),  # RT_TABLE_COMPAT
            route(oif, kind=7),  # RTN_UNREACHABLE
            route(),
        )
        == set()
    )


def test_a_malformed_hop_ends_the_list() -> None:
    broken = struct.pack("=HBBi", 0, 0, 0, 6)
    assert default_devices(route(netlink.attribute(MULTIPATH, hop(5, bytes(4)) + broken))) == {5}


def preferred(*routes: bytes) -> dict[int, list[str]]:
    found = links.preferred_sources(map(rtnetlink.route, routes)).items()
    return {ifindex: [f"{net} {format_address(source)}" for net, source in each] for ifindex, each in found}


def source(*raw: int) -> bytes:
    return netlink.attribute(PREFSRC, bytes(raw))


def test_a_preferred_source_belongs_to_the_next_hops_of_its_route() -> None:
    oif, to = netlink.attribute(OIF, number(4)), netlink.attribute(DST, bytes((198, 51, 100, 0)))
    gateway = netlink.attribute(GATEWAY, bytes((192, 0, 2, 1)))
    via = netlink.attribute(VIA, struct.pack("=H", INET6) + bytes((0xFE, 0x80, *bytes(13), 1)))
    hops = hop(5, bytes((192, 0, 2, 1))) + hop(6, b"")
    assert preferred(
        route(oif, gateway, source(203, 0, 113, 7)),
        route(oif, to, source(203, 0, 113, 8), length=24),
        route(oif, via, source(203, 0, 113, 9), length=8),
        route(to, netlink.attribute(MULTIPATH, hops), source(203, 0, 113, 7), length=24),
    ) == {
        4: ["192.0.2.1/32 203.0.113.7", "198.51.100.0/24 203.0.113.8", "fe80::1/128 203.0.113.9"],
        5: ["192.0.2.1/32 203.0.113.7"],
        6: ["198.51.100.0/24 203.0.113.7"],
    }


def test_by_the_same_gateway_the_main_table_and_short_prefixes_come_first() -> None:
    oif, gateway = netlink.attribute(OIF, number(4)), netlink.attribute(GATEWAY, bytes((192, 0, 2, 1)))
    routes = [
        route(oif, gateway, source(203, 0, 113, 1), table=100),
        route(oif, gateway, source(203, 0, 113, 3), length=8),
        route(oif, gateway, source(203, 0, 113, 2)),
    ]
    for order in itertools.permutations(routes):
        assert preferred(*order) == {4: ["192.0.2.1/32 203.0.113.2"]}


def test_routes_of_the_kernel_and_other_types_have_no_preferred_source() -> None:
    oif, own = netlink.attribute(OIF, number(4)), source(192, 0, 2, 10)
    assert preferred(route(oif, own, protocol=2), route(oif, own, kind=7), route(oif)) == {}


@given(st.binary(max_size=120), st.binary(max_size=120), st.binary(max_size=120))
def test_junk_in_the_attributes_raises_nothing(one: bytes, two: bytes, three: bytes) -> None:
    found = rtnetlink.link(link(1, "n0") + one)
    links.devices(
        [found], rtnetlink.decoded_addresses([address(1, bytes(4)) + two]), [rtnetlink.route(route(three))]
    )


def test_only_notifications_about_devices_are_relevant() -> None:
    def report(kind: int, body: bytes) -> bytes:
        return netlink.message(kind, 0, 0, body)[: rtnetlink_watch.REPORT_BYTES]

    assert links._is_relevant(report(24, route()))
    assert links._is_relevant(report(25, route(family=INET6)))
    assert not links._is_relevant(report(24, route(length=24)))
    assert not links._is_relevant(report(25, route(table=255)))
    assert links._is_relevant(report(16, link(1, "n0")))  # RTM_NEWLINK
    assert links._is_relevant(report(20, address(1, bytes(4))))  # RTM_NEWADDR
    assert links._is_relevant(b"")
    attributes = netlink.attribute(DST, bytes(4)), source(192, 0, 2, 10)
    assert links._is_relevant(report(24, route(*attributes, length=24)))
    assert not links._is_relevant(report(24, route(*attributes, length=24, protocol=2)))


def test_a_failure_to_read_names_becomes_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "if_nameindex", fail)
    with pytest.raises(Rejected, match="cannot read the network devices: Too many open files"):
        links.names()
