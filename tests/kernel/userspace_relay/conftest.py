"""A userspace backend with two relays in a network namespace, and servers as endpoints."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.userspace.backend import UserspaceBackend
from ebpfproxy.backends.userspace.entries import UserspaceSettings
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol, family, is_unspecified, parse_address
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.balancing import PlannedBalancing
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    NodePlan,
    NoEndpointAction,
    PlannedEndpoint,
    PlannedEndpoints,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.support.namespace import namespace

ADDRESS, PORT = "10.96.0.1", 80
_CLUSTER = PolicyResult(Scope.CLUSTER, True)


def plan(
    *endpoints: tuple[str, int],
    protocol: Protocol = Protocol.TCP,
    affinity: int = 0,
    balancing: PlannedBalancing = PlannedBalancing(),  # noqa: B008 -- it is immutable
    at: Sequence[tuple[str, int]] = ((ADDRESS, PORT),),
    name: str = "web",
) -> ServicePortPlan:
    """A Service at these addresses and ports with these endpoints. An unspecified address is a NodePort."""
    frontends = [Frontend(parse_address(address), port, protocol) for address, port in at]
    kinds = [
        FrontendKind.NODE_PORT if is_unspecified(each.address) else FrontendKind.CLUSTER_IP
        for each in frontends
    ]
    return ServicePortPlan(
        ServicePortName("default", name, "", protocol),
        family(frontends[0].address),
        tuple(
            FrontendPlan(each, kind, _CLUSTER, _CLUSTER, _CLUSTER)
            for each, kind in zip(frontends, kinds, strict=True)
        ),
        PlannedEndpoints(
            PlannedEndpoint(parse_address(ip), port, True, True, True) for ip, port in endpoints
        ),
        NoEndpointAction.DROP if endpoints else NoEndpointAction.REJECT,
        affinity,
        balancing=balancing,
    )


class Place:
    """The backend, in the network namespace of the calling thread. Endpoints are at addresses of loopback."""

    def __init__(self, backend: UserspaceBackend, stack: contextlib.ExitStack) -> None:
        self.backend = backend
        self._stack = stack
        self._entries: dict[Any, Any] = {}

    def serve(self, *plans: ServicePortPlan, node: NodePlan = NodePlan()) -> None:  # noqa: B008
        """Bring these plans into force."""
        desired = self.backend.render(plans, node)
        assert not self.backend.apply(diff(self.backend.read(), desired))
        assert self.backend.read() == desired

    def listen(self, address: str = "127.0.0.1", backlog: int = 128) -> socket.socket:
        """A TCP server socket of the test, with a port of the kernel's choice."""
        server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        server.settimeout(10.0)
        server.bind((address, 0))
        server.listen(backlog)
        return self._stack.enter_context(server)

    def echo(self, address: str = "127.0.0.1") -> tuple[str, int]:
        """A TCP server that sends everything back; its address and port."""
        server = self.listen(address)
        server.settimeout(None)
        threading.Thread(target=_accept, args=(server, _echo), daemon=True).start()
        host, port = server.getsockname()
        return host, port

    def named(self, address: str) -> tuple[str, int]:
        """A TCP server that sends its address and closes the connection."""
        server = self.listen(address)
        server.settimeout(None)

        def tell(client: socket.socket) -> None:
            client.sendall(address.encode())

        threading.Thread(target=_accept, args=(server, tell), daemon=True).start()
        host, port = server.getsockname()
        return host, port

    def udp(self, address: str = "127.0.0.1") -> socket.socket:
        """A UDP server socket of the test."""
        server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        server.settimeout(10.0)
        server.bind((address, 0))
        return self._stack.enter_context(server)

    def connect(self, source: str = "") -> socket.socket:
        """A client that is connected to the Service."""
        client = socket.create_connection((ADDRESS, PORT), 10.0, (source, 0) if source else None)
        return self._stack.enter_context(client)

    def answer(self, source: str = "") -> str:
        """What an endpoint of `named` sends on a new connection."""
        with self.connect(source) as client:
            return b"".join(iter(lambda: client.recv(100), b"")).decode()


def _accept(server: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = server.accept()
            threading.Thread(target=_handle, args=(client, handle), daemon=True).start()


def _handle(client: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    with client, contextlib.suppress(OSError):
        handle(client)


def _echo(client: socket.socket) -> None:
    while data := client.recv(1 << 16):
        client.sendall(data)


@pytest.fixture
def settings() -> UserspaceSettings:
    """Tests override it."""
    return UserspaceSettings(relays=2, udp_timeout=60.0)


@pytest.fixture
def place(settings: UserspaceSettings) -> Iterator[Place]:
    with namespace("userspace") as made, made.entered(), contextlib.ExitStack() as stack:
        netns.set_loopback_up()
        backend = UserspaceBackend(settings)
        backend.open()
        stack.callback(backend.close)
        yield Place(backend, stack)
