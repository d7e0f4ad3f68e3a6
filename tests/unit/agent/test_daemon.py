"""The control thread with a fake mode: its end."""

import queue
from pathlib import Path

import pytest

from ebpfproxy.agent import daemon, mode_switch
from ebpfproxy.agent.ending import Ending
from ebpfproxy.agent.front import Front
from ebpfproxy.agent.inbox import Inbox, Stop
from ebpfproxy.backends.selection import choose
from ebpfproxy.config import Config, Loaded
from ebpfproxy.errors import KernelError
from tests.support.modes import FakeMode


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


def test_a_signal_closes_the_mode_and_releases_the_network_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, lock = FakeMode("one"), Lock()
    monkeypatch.setattr(mode_switch, "MODES", (mode,))
    monkeypatch.setattr(mode_switch, "choose", lambda config, failed: choose(config, (mode,), failed))
    monkeypatch.setattr(mode_switch, "NamespaceLock", lambda patience: lock)
    config = Config(
        hostname_override="here",
        proxy_mode="one",
        manifests=tmp_path,
        oom_score_adj=int(Path("/proc/self/oom_score_adj").read_text()),
    )
    loaded = Loaded(config, (), {}, {}, None)
    inbox: Inbox = queue.SimpleQueue()
    inbox.put(Stop("SIGTERM"))
    ending = Unlimited()
    daemon.run(loaded, lambda: loaded, inbox, Front(loaded), ending)
    assert not ending.restarts
    assert not lock.is_held
    with pytest.raises(KernelError, match="not open"):
        mode.plane.read()
