"""The control thread with fake modes: what it does at its start, at a switch of the mode, and at its end."""

import contextlib
import dataclasses
import gc
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from ebpfproxy.agent import daemon, mode_switch
from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.agent.announcer import Announcer
from ebpfproxy.agent.ending import Ending
from ebpfproxy.agent.front import Front
from ebpfproxy.agent.inbox import Inbox, Reload, Stop
from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.agent.sources import Run, Sources, tracker_for
from ebpfproxy.api.event import Synced
from ebpfproxy.backends.selection import Choice, Lack, choose
from ebpfproxy.config import Config, Loaded
from ebpfproxy.errors import KernelError
from tests.support.fake_backend import FakeBackend
from tests.support.modes import FakeMode

QUIET = 0.3
"""Seconds in which nothing happens: less than until the first check."""
OOM_SCORE = Path("/proc/self/oom_score_adj")


def oom_score() -> int:
    return int(OOM_SCORE.read_text())


class Unlimited(Ending):
    """An end of the agent that may take any time."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def begin(self) -> None:
        pass


class Lock:
    """The lock of a network namespace that no other agent has."""

    def __init__(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False


class Node:
    """A node without Services and devices, and an agent that starts in mode one."""

    def __init__(self, manifests: Path) -> None:
        self.one, self.other = FakeMode("one"), FakeMode("other")
        self.lock = Lock()
        self.inbox: Inbox = queue.SimpleQueue()
        self.config = Config(
            hostname_override="here", proxy_mode="one", manifests=manifests, oom_score_adj=oom_score()
        )
        self.reread = self.config
        """The configuration after a Reload."""

    def run(self) -> Ending:
        """Run the agent until an item of the inbox ends it."""
        loaded, ending = Loaded(self.config, (), {}, {}, None), Unlimited()
        reread = lambda: dataclasses.replace(loaded, config=self.reread)  # noqa: E731
        daemon.run(loaded, reread, self.inbox, Front(loaded), ending)
        return ending

    def all_known(self, sources: Sources) -> Iterator[tuple[str, Run]]:
        def run(stop: threading.Event) -> None:
            for kind in tracker_for(self.config).lacking:
                sources.put(Synced(kind))
            stop.wait()

        yield "everything", run


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(tmp_path)
    modes = made.one, made.other

    def chosen(config: Config, failed: Mapping[str, Lack] = MappingProxyType({})) -> Choice:
        return choose(config, modes, failed)

    monkeypatch.setattr(mode_switch, "MODES", modes)
    monkeypatch.setattr(mode_switch, "choose", chosen)
    monkeypatch.setattr(mode_switch, "NamespaceLock", lambda patience: made.lock)
    monkeypatch.setattr(Sources, "_sources", lambda sources: made.all_known(sources))
    score = oom_score()
    yield made
    gc.unfreeze()
    with contextlib.suppress(PermissionError):
        OOM_SCORE.write_text(str(score))


def test_a_signal_closes_the_mode_and_releases_the_network_namespace(node: Node) -> None:
    node.inbox.put(Stop("SIGTERM"))
    assert not node.run().restarts
    assert not node.lock.is_held
    with pytest.raises(KernelError, match="not open"):
        node.one.plane.read()


def test_the_agent_sets_its_oom_score_adjustment(node: Node) -> None:
    wanted = min(oom_score() + 1, 1000)
    node.config = dataclasses.replace(node.config, oom_score_adj=wanted)
    node.inbox.put(Stop("SIGTERM"))
    node.run()
    assert oom_score() == wanted


def test_after_a_switch_the_port_of_the_new_mode_is_announced(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: the next sync may be that of the sync period."""
    ports = {"one": 6081, "other": 6082}
    announced = []

    def accept(announcer: Announcer, port: int) -> None:
        announced.append(port)
        if port == ports["one"]:
            node.inbox.put(Reload("a test"))
            node.inbox.put(Stop("SIGTERM"))

    monkeypatch.setattr(Announcer, "accept", accept)
    monkeypatch.setattr(
        FakeBackend, "dsr_port", lambda plane: ports["one" if plane is node.one.plane else "other"]
    )
    node.one.owns_namespace = node.other.owns_namespace = False
    node.reread = dataclasses.replace(node.config, proxy_mode="other")
    assert not node.run().restarts
    assert announced == [0, 6081, 6082]


def test_after_the_first_sync_the_agent_waits_for_changes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = []
    sync = ActiveMode.sync

    def counted(mode: ActiveMode, verify: bool, retries: int = sys.maxsize) -> SyncResult:
        syncs.append(verify)
        if len(syncs) == 1:
            threading.Timer(QUIET, node.inbox.put, [Stop("SIGTERM")]).start()
        return sync(mode, verify, retries)

    monkeypatch.setattr(ActiveMode, "sync", counted)
    node.one.owns_namespace = False
    node.run()
    assert syncs == [True]
