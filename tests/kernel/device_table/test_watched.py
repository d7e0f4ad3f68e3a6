"""Changes of filters that a backend reports before the next check of its devices."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf.backend import EbpfBackend
from ebpfproxy.backends.ebpf.devices.filter_watch import UNWATCHED, FilterWatch
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.bpf import tc_watch
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netlink import rtnetlink_watch
from tests.kernel.cluster import eventually
from tests.kernel.device_table.plane import (
    CLSACT_ONLY,
    EMPTY_PLAN,
    TCX_ONLY,
    bring,
    plan,
    programs,
    running,
)
from tests.kernel.others import PASS, add_filter, order, program, remove_filters
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel

PATIENCE = 60.0
SIDES = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)


@pytest.fixture
def reported() -> threading.Semaphore:
    """Released by each report that filters have changed."""
    return threading.Semaphore(0)


@pytest.fixture
def watching(settings: EbpfSettings, node: Namespace, reported: threading.Semaphore) -> Iterator[EbpfBackend]:
    """A backend with programs on net."""
    with running(settings, filters_changed=reported.release) as opened:
        assert not bring(opened, EMPTY_PLAN)
        assert not bring(opened, plan("net"))
        yield opened
        bring(opened, EMPTY_PLAN)


def settle(reported: threading.Semaphore) -> None:
    """Await the reports of all changes so far, and discard them."""
    eventually(lambda: is_subscribed() and not unread(), "all notifications were read")
    while reported.acquire(timeout=2 * rtnetlink_watch.STOP_SECONDS):
        pass


def subscriptions() -> list[list[str]]:
    """The rows of /proc/net/netlink for sockets that are subscribed only to notifications of filters."""
    with open("/proc/thread-self/net/netlink") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return [row for row in rows if int(row[3], 16) == tc_watch.GROUPS]


def is_subscribed() -> bool:
    return bool(subscriptions())


def unread() -> int:
    """Bytes of unread notifications in the kernel."""
    return sum(int(row[4]) for row in subscriptions())


def threads() -> int:
    return [each.name for each in threading.enumerate()].count("filter-watch")


@CLSACT_ONLY
@SIDES
def test_a_filter_that_is_placed_first_is_reported_and_overtaken(
    watching: EbpfBackend, reported: threading.Semaphore, side: Side
) -> None:
    settle(reported)
    before, index = watching.generation(), socket.if_nametoindex("net")
    with program(PASS) as foreign:
        add_filter(index, side, foreign)
        assert reported.acquire(timeout=PATIENCE)
        assert watching.generation() != before
        assert not bring(watching, plan("net"))
        assert order(index, side) == [programs("net")[list(Side).index(side)], foreign.id]


@CLSACT_ONLY
def test_a_clsact_that_is_removed_is_reported_and_restored(
    watching: EbpfBackend, reported: threading.Semaphore, node: Namespace
) -> None:
    settle(reported)
    before = watching.generation()
    node.tc("qdisc del dev net clsact")
    assert reported.acquire(timeout=PATIENCE)
    assert watching.generation() != before
    assert not bring(watching, plan("net"))
    assert None not in programs("net")


@CLSACT_ONLY
def test_checks_and_reads_cause_no_notifications(watching: EbpfBackend) -> None:
    """The kernel sends a notification within the call that makes the change."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as notified:
        notified.bind((0, tc_watch.GROUPS))
        notified.setblocking(False)
        for _ in range(3):
            watching.generation()
            assert not bring(watching, plan("net"))
        with pytest.raises(BlockingIOError):
            notified.recv(1)
        assert not bring(watching, plan("net", "pod"))
        assert notified.recv(1)


@CLSACT_ONLY
def test_devices_are_watched_once_they_have_programs(
    watching: EbpfBackend, reported: threading.Semaphore
) -> None:
    with program(PASS) as foreign:
        add_filter(socket.if_nametoindex("pod"), Side.INGRESS, foreign)
        assert not bring(watching, plan("net", "pod"))
        settle(reported)
        remove_filters(socket.if_nametoindex("pod"), Side.INGRESS, "foreign")
        assert reported.acquire(timeout=PATIENCE)


@CLSACT_ONLY
def test_devices_without_programs_are_not_watched(
    settings: EbpfSettings, node: Namespace, reported: threading.Semaphore
) -> None:
    with running(settings, filters_changed=reported.release) as opened, program(PASS) as foreign:
        assert not bring(opened, EMPTY_PLAN)
        eventually(is_subscribed, "the thread has subscribed")
        add_filter(socket.if_nametoindex("pod"), Side.INGRESS, foreign)
        eventually(lambda: not unread(), "the notification was read")
    assert not reported.acquire(blocking=False)


@CLSACT_ONLY
def test_a_failed_watch_is_logged_once_and_checks_find_changes(
    settings: EbpfSettings,
    node: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise Rejected("rejected once")

    monkeypatch.setattr(tc_watch, "watch", fail)
    with running(settings) as opened, program(PASS) as foreign:
        assert not bring(opened, plan("net"))
        eventually(lambda: not opened.is_notified(), "the thread has ended")
        before = opened.generation()
        add_filter(socket.if_nametoindex("net"), Side.INGRESS, foreign)
        assert opened.generation() != before
        bring(opened, EMPTY_PLAN)
    assert [record.message for record in caplog.records].count(UNWATCHED) == 1


@CLSACT_ONLY
def test_a_closed_backend_leaves_no_thread_and_no_subscription(
    settings: EbpfSettings, node: Namespace
) -> None:
    with running(settings) as opened:
        eventually(is_subscribed, "the thread has subscribed")
        assert threads() == 1
        assert opened.is_notified()
    assert threads() == 0
    assert not is_subscribed()
    assert not opened.is_notified()


@CLSACT_ONLY
def test_a_closed_watch_leaves_no_descriptor(node: Namespace) -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    watch = FilterWatch(lambda ifindex: False, lambda: None)
    eventually(is_subscribed, "the thread has subscribed")
    watch.close()
    assert not watch.is_running()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@TCX_ONLY
def test_links_are_not_watched(backend: EbpfBackend) -> None:
    assert threads() == 0
    assert not backend.is_notified()
