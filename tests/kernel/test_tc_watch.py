"""Notifications of changes of filters and qdiscs, in a namespace with the veths net and pod."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.linux.bpf import tc_watch
from ebpfproxy.linux.netlink import rtnetlink_watch
from ebpfproxy.linux.netlink.rtnetlink_watch import Stop
from tests.kernel.cluster import eventually
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

PATIENCE = 60.0
FILTER = "filter add dev {} egress prio {} protocol ip u32 match u32 0 0 flowid 1:1"


class Watch:
    """Watches net in a separate thread. The callback blocks while `resume` is clear."""

    def __init__(self, node: Namespace) -> None:
        self._node = node
        self._calls = threading.Semaphore(0)
        self._stop = Stop()
        self._net = 0
        self.count = 0
        self.resume = threading.Event()
        self.resume.set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume.set()
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._stop.close()

    def called(self) -> None:
        """Await the next call of the callback."""
        assert self._calls.acquire(timeout=PATIENCE)

    def sleeps(self, seconds: float) -> bool:
        """Whether the thread is idle for this time."""
        before = self._switches()
        self._thread.join(seconds)
        return self._thread.is_alive() and self._switches() == before

    def _switches(self) -> str:
        """The number of voluntary context switches of the thread."""
        status = Path(f"/proc/self/task/{self._thread.native_id}/status").read_text()
        return next(line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))

    def _run(self) -> None:
        with self._node.entered():
            self._net = socket.if_nametoindex("net")
            tc_watch.watch(self._is_net, self._changed, self._stop)

    def _is_net(self, ifindex: int) -> bool:
        return ifindex == self._net

    def _changed(self) -> None:
        self.count += 1
        self._calls.release()
        self.resume.wait(PATIENCE)


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace("tc-watch") as made:
        made.ip("link add net type veth", "link add pod type veth")
        yield made


@pytest.fixture
def watch(node: Namespace) -> Iterator[Watch]:
    """A watch that has received its first notification, so that it is subscribed."""
    with Watch(node) as watching:
        subscribed(node)
        node.tc("qdisc add dev net clsact")
        watching.called()
        yield watching


def subscribed(node: Namespace) -> None:
    eventually(lambda: bool(rows(node)), "the thread has subscribed")


def rows(node: Namespace) -> list[list[str]]:
    """The rows of /proc/net/netlink for sockets that are subscribed to these notifications only."""
    with node.entered(), open("/proc/thread-self/net/netlink") as table:
        lines = [line.split() for line in table.readlines()[1:]]
    return [row for row in lines if int(row[3], 16) == tc_watch.GROUPS]


def unread(node: Namespace) -> int:
    """Bytes of unread notifications in the kernel."""
    return sum(int(row[4]) for row in rows(node))


def lost(node: Namespace) -> int:
    return sum(int(row[8]) for row in rows(node))


def test_each_kind_of_change_is_notified(node: Namespace, watch: Watch) -> None:
    for change in (
        FILTER.format("net", 9),
        "filter del dev net egress prio 9",
        FILTER.format("net", 9),
        "filter del dev net egress",
        "qdisc del dev net clsact",
        "qdisc add dev net ingress",
    ):
        node.tc(change)
        watch.called()


def test_a_filter_of_a_shared_block_is_notified_for_all_its_devices(node: Namespace, watch: Watch) -> None:
    node.tc("qdisc add dev pod ingress_block 21 clsact")
    node.tc("filter add block 21 prio 9 protocol ip u32 match u32 0 0 flowid 1:1")
    watch.called()
    assert watch.count == 2


def test_filters_of_other_devices_are_not_notified(node: Namespace) -> None:
    """As if a network plugin attached hundreds of filters while a pod is created."""
    with Watch(node) as watch:
        subscribed(node)
        node.tc("qdisc add dev pod clsact", *(FILTER.format("pod", 9 + i) for i in range(300)))
        eventually(lambda: not unread(node), "all notifications were read")
    assert watch.count == 0


def test_a_burst_of_changes_causes_one_call(node: Namespace, watch: Watch) -> None:
    watch.resume.clear()
    node.tc(FILTER.format("net", 9))
    watch.called()
    node.tc(*(FILTER.format("net", 10 + i) for i in range(300)))
    assert unread(node)
    watch.resume.set()
    watch.called()
    assert watch.count == 3
    assert not unread(node)


def test_lost_notifications_count_as_a_change(node: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notification about net is lost, since those about pod have filled the buffer."""
    monkeypatch.setattr(rtnetlink_watch, "_RECEIVE_BUFFER_BYTES", 1)  # the kernel raises it to its minimum
    with Watch(node) as watch:
        subscribed(node)
        watch.resume.clear()
        node.tc("qdisc add dev net clsact")
        watch.called()
        node.tc("qdisc add dev pod clsact", *(FILTER.format("pod", 9 + i) for i in range(100)))
        before = lost(node)
        node.tc(FILTER.format("net", 9))
        assert lost(node) > before > 0
        watch.resume.set()
        watch.called()


def test_the_thread_does_not_wake_without_changes(node: Namespace) -> None:
    with Watch(node) as watch:
        subscribed(node)
        eventually(lambda: watch.sleeps(3 * rtnetlink_watch.STOP_SECONDS), "the thread sleeps")
