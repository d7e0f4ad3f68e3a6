"""Relays that cannot start, and relays without file descriptors."""

import os
import resource
import signal
from pathlib import Path

import pytest

from ebpfproxy.backends.userspace import relays
from ebpfproxy.backends.userspace.entries import UserspaceSettings
from ebpfproxy.backends.userspace.messages import Event
from ebpfproxy.backends.userspace.relays import Relays
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.child import Child
from tests.kernel.cluster import eventually
from tests.kernel.userspace_relay.conftest import Place, plan

pytestmark = pytest.mark.kernel

ENDS_AT_ONCE = "this"
"""A module of Python that ignores its arguments."""


def test_relays_that_end_at_once_are_an_error_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    def start(module: str) -> Child:
        started.append(Child(ENDS_AT_ONCE if started else module))
        return started[-1]

    monkeypatch.setattr(relays, "Child", start)
    subject = Relays(UserspaceSettings(relays=3), lambda: None)
    with pytest.raises(Rejected, match="does not answer"):
        subject.open()
    assert len(started) == 3
    assert not any(Path(f"/proc/{each.pid}").exists() for each in started)
    assert not subject.pids()


@pytest.mark.parametrize("settings", [UserspaceSettings(relays=1)])
def test_a_relay_that_cannot_be_replaced_is_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.serve(plan(place.named("127.0.0.2")))
    attempts: list[str] = []

    def start(module: str) -> Child:
        attempts.append(module)
        return Child(module if len(attempts) > 1 else ENDS_AT_ONCE)

    monkeypatch.setattr(relays, "Child", start)
    os.kill(place.backend.relays.pids()[0], signal.SIGKILL)
    eventually(lambda: place.backend.relays.replaced == 1, "the relay is replaced")
    assert len(attempts) == 2
    assert place.answer() == "127.0.0.2"


@pytest.mark.parametrize("settings", [UserspaceSettings(relays=1)])
def test_connections_wait_while_a_relay_has_no_file_descriptors(place: Place) -> None:
    place.serve(plan(place.named("127.0.0.2")))
    (pid,) = place.backend.relays.pids()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, limits[1]))
    client = place.connect()
    eventually(
        lambda: place.backend.report().events.get(Event.NOT_ACCEPTED, 0) > 0, "the relay cannot accept"
    )
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert client.recv(100) == b"127.0.0.2"
