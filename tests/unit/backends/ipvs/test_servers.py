"""Virtual servers are changed as little as possible, and real servers are drained."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ebpfproxy.backends.ipvs.entries import Server, ServerEntry
from ebpfproxy.backends.ipvs.servers import Servers
from ebpfproxy.errors import AlreadyExists, NotFound
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.ipvs.ipvs import Rejection
from ebpfproxy.linux.ipvs.messages import Connections, Flag, Listed, RealServer, ServerKey, VirtualServer
from ebpfproxy.model.address import Address, Family, Protocol, parse_address
from ebpfproxy.plan.service_plan import Frontend

ONE, TWO = (RealServer(parse_address(f"10.1.0.{n}"), 8080) for n in (1, 2))
NO_CONNECTIONS = Connections(0, 0)


class FakeIpvs:
    """Replaces `linux.ipvs`, with operations as calls. `busy`: addresses that have connections."""

    def __init__(self) -> None:
        self.table: dict[ServerKey, tuple[VirtualServer, dict[tuple[Address, int], RealServer]]] = {}
        self.busy: set[Address] = set()
        self.done: list[str] = []

    def add_server(self, server: VirtualServer) -> Callable[[], None]:
        def do() -> None:
            if server.key in self.table:
                raise AlreadyExists("there is one")
            self.table[server.key] = server, {}

        return self._named("add server", do)

    def change_server(self, server: VirtualServer) -> Callable[[], None]:
        return self._named(
            "change server", lambda: self.table.update({server.key: (server, self._reals(server.key))})
        )

    def delete_server(self, key: ServerKey) -> Callable[[], None]:
        def do() -> None:
            self._reals(key)
            del self.table[key]

        return self._named("delete server", do)

    def add_real(self, key: ServerKey, real: RealServer) -> Callable[[], None]:
        def do() -> None:
            if (real.address, real.port) in self._reals(key):
                raise AlreadyExists("there is one")
            self._reals(key)[real.address, real.port] = real

        return self._named("add real", do)

    def change_real(self, key: ServerKey, real: RealServer) -> Callable[[], None]:
        def do() -> None:
            if (real.address, real.port) not in self._reals(key):
                raise NotFound("there is none")
            self._reals(key)[real.address, real.port] = real

        return self._named(f"weight {real.weight}", do)

    def delete_real(self, key: ServerKey, address: Address, port: int) -> Callable[[], None]:
        return self._named("delete real", lambda: self._reals(key).pop((address, port)))

    def apply(self, operations: Sequence[Callable[[], None]]) -> list[Rejection]:
        rejections = []
        for position, operation in enumerate(operations):
            try:
                operation()
            except (AlreadyExists, NotFound) as error:
                rejections.append(Rejection(position, error))
        return rejections

    def read_one(self, key: ServerKey) -> Listed:
        server, reals = self.table[key] if key in self.table else (None, self._reals(key))
        assert server
        return Listed(
            server,
            {r: Connections(1, 0) if r.address in self.busy else NO_CONNECTIONS for r in reals.values()},
        )

    def read(self) -> dict[ServerKey, Listed]:
        return {key: self.read_one(key) for key in self.table}

    def _reals(self, key: ServerKey) -> dict[tuple[Address, int], RealServer]:
        if key not in self.table:
            raise NotFound("there is none")
        return self.table[key][1]

    def _named(self, name: str, do: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            do()
            self.done.append(name)

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeIpvs:
    fake = FakeIpvs()
    for name in (
        *("add_server", "change_server", "delete_server", "add_real", "change_real", "delete_real"),
        *("apply", "read", "read_one"),
    ):
        monkeypatch.setattr(ipvs, name, getattr(fake, name))
    return fake


def key(protocol: Protocol = Protocol.TCP) -> Server:
    return Server(Family.IPV4, Frontend(parse_address("10.96.0.1"), 80, protocol))


def entry(*reals: RealServer, scheduler: str = "rr") -> ServerEntry:
    return ServerEntry(scheduler, Flag(0), 0, reals)


def opened() -> Servers:
    servers = Servers()
    servers.read(lambda frontend: True)
    return servers


def put(servers: Servers, wanted: ServerEntry, at: Server | None = None) -> None:
    assert not servers.put({at or key(): wanted})
    assert servers.read(lambda frontend: True) == {at or key(): wanted}


def weights(kernel: FakeIpvs) -> dict[RealServer, int]:
    ((_, reals),) = kernel.table.values()
    return {real._replace(weight=1): real.weight for real in reals.values()}


def test_only_differences_are_written(kernel: FakeIpvs) -> None:
    servers = opened()
    put(servers, entry(ONE))
    assert kernel.done == ["add server", "add real"]
    put(servers, entry(ONE, TWO))
    put(servers, entry(ONE, TWO, scheduler="lc"))
    put(servers, entry(ONE, TWO, scheduler="lc"))
    assert kernel.done[2:] == ["add real", "change server"]


def test_an_endpoint_with_connections_is_drained_and_then_deleted(kernel: FakeIpvs) -> None:
    servers = opened()
    put(servers, entry(ONE, TWO))
    kernel.busy = {ONE.address}
    put(servers, entry(TWO))
    assert weights(kernel) == {ONE: 0, TWO: 1}
    servers.delete_drained()
    assert weights(kernel) == {ONE: 0, TWO: 1}
    kernel.busy.clear()
    servers.read(lambda frontend: True)
    servers.delete_drained()
    assert weights(kernel) == {TWO: 1}


def test_an_endpoint_without_connections_is_deleted_after_the_next_read(
    kernel: FakeIpvs,
) -> None:
    """Another CPU may handle a connection to it that is not counted yet."""
    servers = opened()
    put(servers, entry(ONE, TWO))
    assert not servers.put({key(): entry(TWO)})
    servers.delete_drained()
    assert weights(kernel) == {ONE: 0, TWO: 1}
    servers.read(lambda frontend: True)
    servers.delete_drained()
    assert weights(kernel) == {TWO: 1}


def test_an_endpoint_of_udp_is_deleted_at_once(kernel: FakeIpvs) -> None:
    kernel.busy = {ONE.address}
    servers = opened()
    put(servers, entry(ONE, TWO), key(Protocol.UDP))
    put(servers, entry(TWO), key(Protocol.UDP))
    assert weights(kernel) == {TWO: 1}


@pytest.mark.parametrize("restarted", [False, True])
def test_an_endpoint_that_is_added_again_gets_its_weight_back(kernel: FakeIpvs, restarted: bool) -> None:
    servers = opened()
    put(servers, entry(ONE, TWO))
    kernel.busy = {ONE.address}
    put(servers, entry(TWO))
    if restarted:
        servers = opened()
    put(servers, entry(ONE, TWO))
    assert weights(kernel) == {ONE: 1, TWO: 1}


def test_a_concurrent_change_by_another_program_is_read_and_overwritten(kernel: FakeIpvs) -> None:
    servers = opened()
    put(servers, entry(ONE))
    kernel.table.clear()
    put(servers, entry(ONE, TWO))
    kernel.apply([kernel.delete_real(ServerKey(*key().frontend), TWO.address, TWO.port)])
    put(servers, entry(ONE, TWO._replace(weight=2)))
    assert weights(kernel) == {ONE: 1, TWO: 2}


def test_a_virtual_server_is_deleted_at_once_and_a_missing_one_is_no_error(kernel: FakeIpvs) -> None:
    servers = opened()
    put(servers, entry(ONE))
    kernel.busy = {ONE.address}
    assert not servers.drop([key()])
    assert kernel.table == {}
    put(servers, entry(ONE))
    kernel.table.clear()
    assert not servers.drop([key()])


def test_virtual_servers_of_other_programs_are_neither_read_nor_deleted(kernel: FakeIpvs) -> None:
    foreign = VirtualServer(ServerKey(parse_address("192.0.2.1"), 443, Protocol.TCP), "rr")
    kernel.apply([kernel.add_server(foreign)])
    servers = Servers()
    assert servers.read(lambda frontend: False) == {}
    assert not servers.drop([Server(Family.IPV4, Frontend(*foreign.key))])
    assert list(kernel.table) == [foreign.key]
