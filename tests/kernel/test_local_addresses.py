"""The local routing table of a separate namespace, read and watched."""

import contextlib
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import local_addresses, rtnetlink_watch
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.model.address import Network, format_network

pytestmark = pytest.mark.kernel

LOOPBACK = {"127.0.0.0/8", "127.0.0.1/32", "::1/128"}


class Node:
    """A network namespace with this name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ip(self, *lines: str) -> None:
        subprocess.run(["ip", "-n", self.name, "-batch", "-"], input="\n".join(lines).encode(), check=True)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with open(f"/run/netns/{self.name}", "rb") as opened, namespaces.in_namespace(opened.fileno()):
            yield

    def read(self) -> set[str]:
        with self.entered():
            return texts(local_addresses.read())

    def read_until(self, wanted: set[str]) -> None:
        """Read until the result is `wanted`, at most 60 s: the kernel adds the routes of IPv6 addresses only
        after it has noticed the carrier, which is asynchronous (net/core/link_watch.c)."""
        deadline = time.monotonic() + 60
        while (found := self.read()) != wanted:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)


@pytest.fixture
def bare() -> Iterator[Node]:
    """A new namespace without changes: loopback was never up."""
    name = f"ebpfproxy-test-{os.getpid()}-local"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield Node(name)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def node(bare: Node) -> Node:
    """A namespace with loopback up, and a veth pair n0 and n1 that is down and has no addresses."""
    bare.ip("link set lo up", "link add n0 type veth peer name n1")
    bare.ip("link set n0 addrgenmode none", "link set n1 addrgenmode none")
    return bare


def texts(networks: frozenset[Network]) -> set[str]:
    return {format_network(one) for one in networks}


class Watch:
    """`watch` in a thread; `next` returns the next report."""

    def __init__(self, node: Node) -> None:
        self.reports: queue.Queue[set[str]] = queue.Queue()
        self.stop = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self._node = node
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._node.entered():
            local_addresses.watch(self._changed, self.stop)

    def _changed(self, networks: frozenset[Network]) -> None:
        self.reports.put(texts(networks))
        self.go_on.wait(10)

    def next(self) -> set[str]:
        return self.reports.get(timeout=60)

    def until(self, wanted: set[str]) -> None:
        while self.next() != wanted:
            pass

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.go_on.set()
        self._thread.join(5)
        assert not self._thread.is_alive()


def test_addresses_of_all_devices_and_of_loopback_are_local(node: Node) -> None:
    node.ip(
        "addr add 10.255.77.5/24 dev n0",
        "addr add fd00:77::5/64 dev n0 nodad",
        "link set n0 up",
        "link set n1 up",
    )
    node.read_until(LOOPBACK | {"10.255.77.5/32", "fd00:77::5/128"})


def test_broadcast_anycast_and_multicast_routes_are_not_local(node: Node) -> None:
    node.ip("addr add 10.255.77.5/24 brd + dev n0", "link set n0 up", "link set n1 up")
    node.ip(
        "route add broadcast 10.255.78.0 dev n0 table local",
        "route add multicast 239.0.0.0/8 dev n0 table local",
    )
    assert node.read() == LOOPBACK | {"10.255.77.5/32"}


def test_a_local_route_for_a_prefix_makes_the_prefix_local(node: Node) -> None:
    node.ip("route add local 10.255.79.0/24 dev lo", "route add local fd00:79::/64 dev lo")
    assert node.read() == LOOPBACK | {"10.255.79.0/24", "fd00:79::/64"}


def test_local_routes_of_other_tables_are_ignored(node: Node) -> None:
    node.ip("route add local 10.255.79.0/24 dev lo table 100", "route add blackhole 10.255.80.0/24")
    assert node.read() == LOOPBACK


def test_a_namespace_whose_loopback_was_never_up_has_no_local_addresses(bare: Node) -> None:
    assert bare.read() == set()


def test_thousands_of_local_addresses_are_read(node: Node) -> None:
    """As many as mode ipvs has on kube-ipvs0; they need several datagrams of a dump."""
    wanted = [f"10.1.{number // 256}.{number % 256}/32" for number in range(3000)]
    node.ip(*(f"addr add {one} dev lo" for one in wanted))
    assert node.read() == LOOPBACK | set(wanted)


def test_addresses_on_kube_ipvs0_are_local_only_if_another_device_has_them(
    node: Node,
) -> None:
    """A veth device gets the name, because not every kernel has dummy devices. It is up: otherwise its IPv6
    addresses would have no local routes."""
    node.ip(
        "link set n1 name kube-ipvs0",
        "link set n0 up",
        "link set kube-ipvs0 up",
        "addr add 10.96.0.1/32 dev kube-ipvs0",
        "addr add fd00:96::1/128 dev kube-ipvs0 nodad",
        "addr add 10.255.77.5/32 dev kube-ipvs0",
        "addr add 10.255.77.5/24 dev n0",
        "addr add fd00:77::5/128 dev kube-ipvs0 nodad",
        "addr add fd00:77::5/64 dev n0 nodad",
    )
    with Watch(node) as watch:
        watch.until(LOOPBACK | {"10.255.77.5/32", "fd00:77::5/128"})
        node.ip("link set kube-ipvs0 down", "link set kube-ipvs0 name n1", "link set n1 up")
        watch.until(LOOPBACK | {"10.255.77.5/32", "fd00:77::5/128", "10.96.0.1/32"})


def test_the_first_report_is_immediate_and_later_ones_follow_changes(node: Node) -> None:
    with Watch(node) as watch:
        assert watch.next() == LOOPBACK
        node.ip("addr add 10.255.77.5/32 dev lo")
        assert watch.next() == LOOPBACK | {"10.255.77.5/32"}
        node.ip("addr add fd00:77::5/128 dev lo nodad")
        assert watch.next() == LOOPBACK | {"10.255.77.5/32", "fd00:77::5/128"}
        node.ip("addr del 10.255.77.5/32 dev lo", "addr del fd00:77::5/128 dev lo")
        watch.until(LOOPBACK)


def test_a_down_device_keeps_ipv4_addresses_and_a_deleted_one_none(node: Node) -> None:
    """As in the kernel: an IPv4 address stays local while its device is down."""
    four, six = "10.255.77.5/32", "fd00:77::5/128"
    node.ip("addr add 10.255.77.5/24 dev n0", "addr add fd00:77::5/64 dev n0 nodad")
    node.ip("link set n0 up", "link set n1 up")
    with Watch(node) as watch:
        watch.until(LOOPBACK | {four, six})
        node.ip("link set n0 down")
        watch.until(LOOPBACK | {four})
        node.ip("link del n0")
        watch.until(LOOPBACK)


def test_simultaneous_changes_are_one_report(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtnetlink_watch, "COALESCE_SECONDS", 0.5)
    wanted = [f"10.255.77.{number}/32" for number in range(100)]
    with Watch(node) as watch:
        assert watch.next() == LOOPBACK
        node.ip(*(f"addr add {one} dev lo" for one in wanted))
        assert watch.next() == LOOPBACK | set(wanted)


def test_changes_without_effect_on_the_set_are_not_reported(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = threading.Semaphore(0)
    real = local_addresses.read

    def counted() -> frozenset[Network]:
        result = real()
        reads.release()
        return result

    monkeypatch.setattr(local_addresses, "read", counted)
    with Watch(node) as watch:
        assert watch.next() == LOOPBACK
        assert reads.acquire(timeout=60)
        node.ip("link set n0 mtu 1400")
        assert reads.acquire(timeout=60)
        node.ip("addr add 10.255.77.5/32 dev lo")
        assert watch.next() == LOOPBACK | {"10.255.77.5/32"}
        assert watch.reports.empty()


def test_after_dropped_notifications_the_table_is_read_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOBUFS: the reader is blocked while more notifications arrive than fit in its buffer."""
    monkeypatch.setattr(rtnetlink_watch, "_RECEIVE_BUFFER_BYTES", 1)  # the kernel's minimum
    wanted = [f"10.1.{number // 256}.{number % 256}/32" for number in range(300)]
    with Watch(node) as watch:
        watch.go_on.clear()
        assert watch.next() == LOOPBACK
        node.ip(*(f"addr add {one} dev lo" for one in wanted))
        assert dropped(node) > 0
        watch.go_on.set()
        watch.until(LOOPBACK | set(wanted))
        node.ip("addr del 10.1.0.7/32 dev lo")
        watch.until(LOOPBACK | set(wanted) - {"10.1.0.7/32"})


def dropped(node: Node) -> int:
    """The number of notifications that the watcher's socket lost: /proc/net/netlink, found by its groups."""
    with node.entered(), open("/proc/thread-self/net/netlink") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(int(row[8]) for row in rows if int(row[3], 16) == rtnetlink_watch.GROUPS)


def test_the_table_is_read_periodically_without_notifications(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rtnetlink_watch, "REREAD_SECONDS", 0.3)
    monkeypatch.setattr(local_addresses, "_is_relevant", lambda _: False)
    with Watch(node) as watch:
        assert watch.next() == LOOPBACK
        node.ip("addr add 10.255.77.5/32 dev lo")
        assert watch.next() == LOOPBACK | {"10.255.77.5/32"}


def test_a_failed_read_does_not_end_the_watch(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real, armed = local_addresses.read, threading.Event()
    failures: list[int] = []

    def failing_once() -> frozenset[Network]:
        if armed.is_set() and not failures:
            failures.append(1)
            raise Rejected("the table changed during each of 10 dumps")
        return real()

    monkeypatch.setattr(local_addresses, "read", failing_once)
    monkeypatch.setattr(rtnetlink_watch, "REREAD_SECONDS", 0.3)
    with Watch(node) as watch:
        assert watch.next() == LOOPBACK
        armed.set()
        node.ip("addr add 10.255.77.5/32 dev lo")
        assert watch.next() == LOOPBACK | {"10.255.77.5/32"}
    assert failures == [1]


def test_stopping_is_prompt_and_leaves_no_descriptor_open(node: Node) -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        with Watch(node) as watch:
            watch.next()
            began = time.monotonic()
        assert time.monotonic() - began < rtnetlink_watch.REREAD_SECONDS / 3
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
