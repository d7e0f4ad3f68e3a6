"""Which routes count as local, decoded from the kernel's messages."""

import struct

import pytest

from ebpfproxy.linux.netlink import dummy, local_addresses, netlink, rtnetlink_watch
from ebpfproxy.model.address import format_network

LOCAL, BROADCAST, ANYCAST, MULTICAST = 2, 3, 4, 5


def route(family: int, length: int, address: bytes, kind: int = LOCAL, table: int = 255) -> bytes:
    head = struct.pack("=BBBBBBBBI", family, length, 0, 0, table, 2, 254, kind, 0)
    return head + netlink.encoded({15: table, 1: address or None})


class Kernel:
    """A kernel that does not filter its answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def local(self, *routes: bytes, kube_ipvs0: int = 0) -> set[str]:
        self._patch.setattr(dummy, "index", lambda _: kube_ipvs0)
        dumps = iter((list(routes), []))
        self._patch.setattr(netlink, "dump", lambda *_, **__: next(dumps))
        return {format_network(net) for net in local_addresses.read()}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def test_addresses_and_networks_of_both_families_are_local(kernel: Kernel) -> None:
    assert kernel.local(
        route(2, 8, bytes([127, 0, 0, 0])),
        route(2, 32, bytes([10, 0, 0, 1])),
        route(10, 128, bytes(15) + b"\1"),
        route(10, 64, b"\xfd" + bytes(15)),
    ) == {"127.0.0.0/8", "10.0.0.1/32", "::1/128", "fd00::/64"}


def test_a_default_route_made_local_has_no_destination(kernel: Kernel) -> None:
    assert kernel.local(route(2, 0, b""), route(10, 0, b"")) == {"0.0.0.0/0", "::/0"}


def test_broadcast_anycast_and_multicast_are_not_local(kernel: Kernel) -> None:
    assert (
        kernel.local(
            route(2, 32, bytes([10, 0, 0, 255]), BROADCAST),
            route(10, 128, b"\xfd" + bytes(15), ANYCAST),
            route(10, 8, b"\xff" + bytes(15), MULTICAST),
        )
        == set()
    )


def test_routes_of_other_tables_are_not_local_if_the_kernel_does_not_filter(kernel: Kernel) -> None:
    assert kernel.local(route(2, 32, bytes([10, 0, 0, 1]), table=254)) == set()


def test_routes_of_kube_ipvs0_are_not_local(kernel: Kernel) -> None:
    by_seven = route(2, 32, bytes([10, 0, 0, 1])) + netlink.encoded({4: 7})
    assert kernel.local(by_seven, kube_ipvs0=7) == set()
    assert len(kernel.local(by_seven, kube_ipvs0=8)) == 1


def test_only_notifications_about_the_local_table_are_relevant() -> None:
    def report(kind: int, body: bytes) -> bytes:
        return netlink.message(kind, 0, 0, body)[: rtnetlink_watch.REPORT_BYTES]

    assert local_addresses._is_relevant(report(24, route(2, 32, bytes(4))))
    assert not local_addresses._is_relevant(report(24, route(2, 32, bytes(4), table=254)))
    assert not local_addresses._is_relevant(report(25, route(2, 32, bytes(4), table=254)))
    assert local_addresses._is_relevant(report(16, bytes(16)))  # RTM_NEWLINK
