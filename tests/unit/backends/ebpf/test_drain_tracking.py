"""Which sockets are added to conntrack before a mode switch, and what is logged if that fails."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from socket import AF_INET, htons
from typing import Any, cast

import pytest

from ebpfproxy.backends.ebpf import abi, drain
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.errors import KernelError, Rejected, Unsupported
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netlink.netlink import Rejection
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import DiagSocket
from ebpfproxy.model.address import Address, Protocol, parse_address

CLIENT, ENDPOINT = (parse_address("10.1.0.7"), 40000), (parse_address("10.1.0.1"), 8080)
Connections = list[tuple[tuple[Address, int], tuple[Address, int]]]


class _Endpoints:
    """The map of endpoints. Only entries with a Service are in use."""

    def __init__(self, *services: int) -> None:
        self._services = services

    def mapped(self) -> "_Memory":
        entries = [abi.ENDPOINT.pack(ENDPOINT[0], htons(ENDPOINT[1]), 0, id_) for id_ in self._services]
        return _Memory(b"".join(entries) + bytes(5))


class _Memory(bytes):
    def close(self) -> None:
        pass


class _Kernel:
    """Two network namespaces, each with one socket that is connected to ENDPOINT."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read_for: list[set[tuple[Address, int]]] = []
        self.tracked: Connections = []
        self.rejected: dict[Rejection, int] = {}
        monkeypatch.setattr(namespaces, "opened_network_namespaces", self._opened)
        monkeypatch.setattr(namespaces, "in_namespace", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(sockets, "read", self.read)
        monkeypatch.setattr(conntrack, "track_tcp", self.track_tcp)

    def _opened(self, proc_root: str) -> Iterator[int]:
        yield from (3, 4)

    def read(
        self, protocol: Protocol, states: Any, destinations: set[tuple[Address, int]]
    ) -> Iterable[DiagSocket]:
        self.read_for.append(destinations)
        return [DiagSocket(AF_INET, protocol, *CLIENT, *ENDPOINT, cookie=len(self.read_for), interface=0)]

    def track_tcp(self, connections: Connections) -> dict[Rejection, int]:
        self.tracked += connections
        return self.rejected


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    return _Kernel(monkeypatch)


def _track(*services: int) -> None:
    drain.track_sockets(cast("Maps", {"endpoints": _Endpoints(*services)}), "/proc")


def _logged(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The values of the one message."""
    (record,) = caplog.records
    assert record.getMessage() == drain.NOT_TRACKED
    return dict(vars(record)["values"])


def test_connections_to_endpoints_in_use_are_tracked_in_every_namespace(kernel: _Kernel) -> None:
    _track(0, 7)
    assert kernel.read_for == [{ENDPOINT}, {ENDPOINT}]
    assert kernel.tracked == [(CLIENT, ENDPOINT), (CLIENT, ENDPOINT)]


def test_without_endpoints_in_use_no_socket_is_read(kernel: _Kernel) -> None:
    _track(0, 0)
    assert kernel.read_for == []
    assert kernel.tracked == []


def test_rejected_entries_are_logged_with_their_number(
    kernel: _Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.rejected = {Rejection(12, "no memory"): 2}
    with caplog.at_level(logging.WARNING):
        _track(7)
    assert _logged(caplog) == {"connections": 2, "reason": "no memory"}


@pytest.mark.parametrize("failure", [Unsupported("no conntrack"), Rejected("no sockets")])
def test_a_kernel_that_cannot_do_it_is_logged(
    kernel: _Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: KernelError
) -> None:
    def fails(connections: Connections) -> None:
        raise failure

    monkeypatch.setattr(conntrack, "track_tcp", fails)
    with caplog.at_level(logging.WARNING):
        _track(7)
    assert _logged(caplog)["reason"] == failure.message
