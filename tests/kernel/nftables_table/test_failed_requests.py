"""Requests of nf_tables that fail before all replies were received, and the requests after them."""

import errno
import socket
from typing import Any

import pytest

from ebpfproxy.backends.nftables import probes
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.nft import messages
from ebpfproxy.linux.nft.messages import Table
from ebpfproxy.linux.nft.nft import Rejection, Session
from ebpfproxy.model.address import Family

pytestmark = pytest.mark.kernel

TABLE = Table("ip", "test")


class FailsOnce:
    """A socket whose first receive fails after the kernel has replied."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self._failed = False

    def recv(self, size: int) -> bytes:
        if self._failed:
            return self._real.recv(size)
        self._failed = True
        raise OSError(errno.ENOBUFS, "No buffer space available")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def interrupted(session: Session) -> None:
    """Make a dump fail, with its replies still in the socket."""
    session._socket = FailsOnce(session._socket)  # type: ignore[assignment]
    with pytest.raises(KernelError, match="No buffer space"):
        session.tables()


def test_after_a_failed_dump_a_transaction_gets_its_own_replies_only() -> None:
    """Found by fault injection: replies to the dump were parsed as rejections, which raised struct.error."""
    with Session() as session:
        assert not session.commit([messages.add_table(TABLE)])
        interrupted(session)
        assert not session.commit([messages.add_chain(TABLE, "one")])
        assert session.tables() == [TABLE]


def test_after_a_failed_transaction_a_dump_gets_its_own_replies_only() -> None:
    with Session() as session:
        session._socket = FailsOnce(session._socket)  # type: ignore[assignment]
        with pytest.raises(KernelError):
            session.commit([messages.add_chain(TABLE, "without a table")])
        assert session.tables() == []
        assert session._socket.gettimeout()


def test_a_family_is_not_missing_because_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by fault injection: the agent served without the family until it was restarted."""
    with Session() as session:
        monkeypatch.setattr(session, "attempt", lambda _: [Rejection(3, errno.ENOMEM, "")])
        with pytest.raises(KernelError) as failure:
            probes.serves(session, Family.IPV4)
    assert not isinstance(failure.value, Unsupported)
