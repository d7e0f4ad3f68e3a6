"""Opening and closing a mode."""

import pytest

from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from tests.support.modes import FakeMode


def test_a_mode_that_cannot_be_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by fault injection: mode iptables left its netlink socket open."""
    mode, closed = FakeMode("one"), []
    active = ActiveMode(mode, Config(hostname_override="here"), Callbacks())

    def fails() -> None:
        raise KernelError("no memory")

    monkeypatch.setattr(mode.plane, "open", fails)
    monkeypatch.setattr(mode.plane, "close", lambda: closed.append(True))
    with pytest.raises(KernelError, match="no memory"):
        active.open()
    assert closed


def test_an_open_mode_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mode, closed = FakeMode("one"), []
    active = ActiveMode(mode, Config(hostname_override="here"), Callbacks())
    monkeypatch.setattr(mode.plane, "close", lambda: closed.append(True))
    active.close()
    assert not closed
    active.open()
    active.close()
    active.close()
    assert closed == [True]
