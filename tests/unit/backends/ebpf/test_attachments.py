"""Programs at devices, as they are named in messages."""

import pytest

from ebpfproxy.backends.ebpf import attachments
from ebpfproxy.errors import NotFound
from ebpfproxy.linux.bpf.bpf import Program


class Loaded:
    """A program of this machine, opened by its id."""

    def __init__(self, called: str) -> None:
        self.called = called
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


@pytest.mark.parametrize(("called", "name"), [("watch", "watch"), ("", "unnamed")])
def test_a_program_is_named_and_closed(called: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded(called)
    monkeypatch.setattr(Program, "by_id", lambda number: loaded)
    assert attachments.program_name(7, "XDP program") == f"{name} (XDP program 7)"
    assert not loaded.is_open


def test_a_program_that_is_gone_is_named_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> Loaded:
        raise NotFound("cannot open program 7")

    monkeypatch.setattr(Program, "by_id", fail)
    assert attachments.program_name(7) == "program 7"
