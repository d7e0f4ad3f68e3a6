"""Which routes count as local, decoded from the kernel's messages."""

import struct

from ebpfproxy.linux.netlink import local_addresses, netlink, rtnetlink_watch
from ebpfproxy.model.address import format_network

LOCAL, BROADCAST, ANYCAST, MULTICAST = 2, 3, 4, 5


def route(family: int, length: int, address: bytes, kind: int = LOCAL, table: int = 255) -> bytes:
    head = struct.pack("=BBBBBBBBI", family, length, 0, 0, table, 2, 254, kind, 0)
    return head + netlink.attribute(15, b"\0\0\0\xff") + (netlink.attribute(1, address) if address else b"")


def texts(*routes: bytes) -> set[str]:
    return {format_network(net) for net in local_addresses.local_networks(routes)}


def test_addresses_and_networks_of_both_families_are_local() -> None:
    assert texts(
        route(2, 8, bytes([127, 0, 0, 0])),
        route(2, 32, bytes([10, 0, 0, 1])),
        route(10, 128, bytes(15) + b"\1"),
        route(10, 64, b"\xfd" + bytes(15)),
    ) == {"127.0.0.0/8", "10.0.0.1/32", "::1/128", "fd00::/64"}


def test_a_default_route_made_local_has_no_destination() -> None:
    assert texts(route(2, 0, b""), route(10, 0, b"")) == {"0.0.0.0/0", "::/0"}


def test_broadcast_anycast_and_multicast_are_not_local() -> None:
    assert (
        texts(
            route(2, 32, bytes([10, 0, 0, 255]), BROADCAST),
            route(10, 128, b"\xfd" + bytes(15), ANYCAST),
            route(10, 8, b"\xff" + bytes(15), MULTICAST),
        )
        == set()
    )


def test_routes_of_other_tables_are_not_local_if_the_kernel_does_not_filter() -> None:
    assert texts(route(2, 32, bytes([10, 0, 0, 1]), table=254)) == set()


def test_routes_of_the_excluded_device_are_not_local() -> None:
    by_seven = route(2, 32, bytes([10, 0, 0, 1])) + netlink.attribute(4, struct.pack("=I", 7))
    assert local_addresses.local_networks([by_seven], excluded_device=7) == set()
    assert len(local_addresses.local_networks([by_seven], excluded_device=8)) == 1


def test_only_notifications_about_the_local_table_are_relevant() -> None:
    def report(kind: int, body: bytes) -> bytes:
        return netlink.message(kind, 0, 0, body)[: rtnetlink_watch.REPORT_BYTES]

    assert local_addresses._is_relevant(report(24, route(2, 32, bytes(4))))
    assert not local_addresses._is_relevant(report(24, route(2, 32, bytes(4), table=254)))
    assert not local_addresses._is_relevant(report(25, route(2, 32, bytes(4), table=254)))
    assert local_addresses._is_relevant(report(16, bytes(16)))  # RTM_NEWLINK
