"""Connections are distributed as the algorithm and the weights require, in mode nftables."""

import collections
import contextlib
import dataclasses
import itertools
import select
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.nftables import table
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import Chain
from ebpfproxy.backends.nftables.shares import shares
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.nft.messages import Operation
from ebpfproxy.linux.nft.nft import Rejection, Session
from ebpfproxy.model.address import Address, Family, format_address, parse_address
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.balancing import PlannedBalancing
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan
from tests.kernel.loopback import add_addresses
from tests.kernel.test_nftables_objects import listening, port_plan
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

AFFINITY = 600
CLIENTS = {Family.IPV4: "10.2.0.0", Family.IPV6: "fd02::"}
CLUSTER_IP, BALANCER = 0, 1
"""The frontends of the plan."""


@contextlib.contextmanager
def new_node(number: int) -> Iterator[Namespace]:
    """A node that has the addresses of all pods and clients itself."""
    with namespace(f"balancing-{number}") as made:
        made.ip("link set lo up")
        made.ip("link add uplink type veth peer name nowhere", "link set uplink up", "link set nowhere up")
        with made.entered():
            add_addresses(f"192.0.2.{number}", f"2001:db8::{number}")
        made.ip(*(f"route add default dev uplink src {own}{number}" for own in ("192.0.2.", "2001:db8::")))
        for prefix in ("10.1.0.0/16", "10.2.0.0/16", "fd01::/64", "fd02::/64"):
            made.ip(f"route add local {prefix} dev lo")
        with made.entered():
            sysctl.ensure("net/ipv6/ip_nonlocal_bind", "1")
        yield made


@pytest.fixture(scope="module")
def _nodes() -> Iterator[tuple[Namespace, Namespace]]:
    with new_node(10) as one, new_node(11) as other:
        yield one, other


@pytest.fixture
def nodes(_nodes: tuple[Namespace, Namespace]) -> Iterator[tuple[Namespace, Namespace]]:
    """Two nodes without rules."""
    yield _nodes
    for each in _nodes:
        with each.entered(), contextlib.closing(NftablesBackend()) as backend:
            backend.open()
            backend.apply(diff(backend.read(), {}))


@pytest.fixture(params=list(Family), ids=lambda of: of.value)
def of(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


class Service:
    """One Service in mode nftables on a node, with a listener for each endpoint. Within a `with` block the
    calling thread is on the node."""

    def __init__(self, node: Namespace, of: Family, endpoints: int) -> None:
        self._node = node
        self._most = port_plan(of, 0, endpoints=endpoints)
        self.plan = self._most

    def __enter__(self) -> "Service":
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._node.entered())
            self.backend = opened.enter_context(contextlib.closing(NftablesBackend()))
            self.backend.open()
            self._listeners = listening(self._most, opened)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def set(
        self, algorithm: Algorithm | None, *weights: int, affinity: int = 0, endpoints: int | None = None
    ) -> None:
        """Program the Service. Without weights all are 1; `endpoints`: only the first ones."""
        self.plan = dataclasses.replace(
            self._most,
            endpoints=self._most.endpoints[:endpoints],
            affinity_timeout=affinity,
            balancing=PlannedBalancing(algorithm, weights),
        )
        wanted = self.backend.render([self.plan], NodePlan())
        assert not self.backend.apply(diff(self.backend.read(), wanted))
        assert self.backend.read() == wanted

    def reached(self, client: int = 1, frontend: int = CLUSTER_IP) -> int:
        """The number of the endpoint that a new connection of a client reaches."""
        return self.reached_from_port(client, frontend)[0]

    def reached_from_port(self, client: int = 1, frontend: int = CLUSTER_IP) -> tuple[int, int]:
        """As `reached`, and the source port of the connection, which the kernel selects."""
        with connection(self.plan, client, frontend) as made:
            (reached,), _, _ = select.select(self._listeners, [], [], 10)
            reached.accept()[0].close()
            return self._listeners.index(reached), made.getsockname()[1]

    def reached_by(self, port: int) -> int:
        """The number of the endpoint that a connection from this source port reaches."""
        with connection(self.plan, 1, CLUSTER_IP, port):
            (reached,), _, _ = select.select(self._listeners, [], [], 10)
            reached.accept()[0].close()
        return self._listeners.index(reached)

    def all_reached(self, count: int, client: int = 1) -> list[int]:
        return [self.reached(client) for _ in range(count)]


def number_of(of: Family) -> socket.AddressFamily:
    return socket.AF_INET if of is Family.IPV4 else socket.AF_INET6


def address_of(of: Family, client: int) -> Address:
    return Address((int.from_bytes(parse_address(CLIENTS[of])) + client).to_bytes(16))


def connection(
    plan: ServicePortPlan, client: int, frontend: int = CLUSTER_IP, source_port: int = 0
) -> socket.socket:
    """A connection from the address of the client with this number. `source_port`: 0 for any."""
    address, port, _ = plan.frontends[frontend].frontend
    source = address_of(plan.family, client)
    made = socket.socket(number_of(plan.family), socket.SOCK_STREAM)
    try:
        made.settimeout(10)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((format_address(source), source_port))
        made.connect((format_address(address), port))
    except BaseException:
        made.close()
        raise
    return made


def test_round_robin_selects_the_endpoints_in_turn_for_all_frontends(
    nodes: tuple[Namespace, Namespace], of: Family
) -> None:
    with Service(nodes[0], of, 3) as service:
        service.set(Algorithm.ROUND_ROBIN)
        frontends = itertools.cycle((CLUSTER_IP, BALANCER))
        reached = [service.reached(client, next(frontends)) for client in range(1, 8)]
    assert reached == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_selects_an_endpoint_as_often_as_its_weight(
    nodes: tuple[Namespace, Namespace], of: Family
) -> None:
    with Service(nodes[0], of, 2) as service:
        service.set(Algorithm.ROUND_ROBIN, 3, 1)
        assert service.all_reached(8) == [0, 0, 1, 0] * 2
        service.set(Algorithm.ROUND_ROBIN, 1, 3)
        assert collections.Counter(service.all_reached(8)) == {0: 2, 1: 6}


def test_random_selects_an_endpoint_by_its_weight(nodes: tuple[Namespace, Namespace], of: Family) -> None:
    """400 connections to endpoints of the weights 3 and 1: 7 standard deviations are 60."""
    with Service(nodes[0], of, 2) as service:
        service.set(None, 3, 1)
        counts = collections.Counter(service.all_reached(400))
        assert 240 <= counts[0] <= 360, counts
        service.set(None, 1, 3)
        counts = collections.Counter(service.all_reached(400))
        assert 240 <= counts[1] <= 360, counts


def test_source_hash_selects_the_same_endpoint_for_a_client_on_all_nodes(
    nodes: tuple[Namespace, Namespace], of: Family
) -> None:
    found: list[list[int]] = []
    for node in nodes:
        with Service(node, of, 3) as service:
            service.set(Algorithm.SOURCE_HASH)
            for frontend in (CLUSTER_IP, BALANCER, CLUSTER_IP):
                found.append([service.reached(client, frontend) for client in range(64)])
    assert all(each == found[0] for each in found)
    assert all(count >= 10 for count in collections.Counter(found[0]).values())
    assert len(set(found[0])) == 3


@pytest.mark.parametrize("affinity", [0, AFFINITY])
def test_source_hash_selects_an_endpoint_by_its_weight(
    nodes: tuple[Namespace, Namespace], of: Family, affinity: int
) -> None:
    """The clients and the hash are always the same."""
    with Service(nodes[0], of, 2) as service:
        service.set(Algorithm.SOURCE_HASH, 1, 3, affinity=affinity)
        counts = collections.Counter(service.reached(client) for client in range(200))
    assert 120 <= counts[1] <= 180, counts


@pytest.mark.parametrize("affinity", [0, AFFINITY])
@pytest.mark.parametrize(
    ("algorithm", "weights"),
    [(Algorithm.MAGLEV, ()), (Algorithm.MAGLEV, (3, 1, 2)), (Algorithm.SOURCE_HASH, (3, 1, 2))],
)
def test_a_hash_selects_the_endpoint_that_explain_computes(
    nodes: tuple[Namespace, Namespace],
    of: Family,
    algorithm: Algorithm,
    weights: tuple[int, ...],
    affinity: int,
) -> None:
    with Service(nodes[0], of, 3) as service:
        service.set(algorithm, *weights, affinity=affinity)
        selection = shares(tuple(service.plan.endpoints), service.plan.balancing, lambda each: each.cluster)
        assert selection
        for client in range(1, 61):  # each only once: session affinity keeps its endpoint
            reached, port = service.reached_from_port(client, client % 2)
            expected = selection.selected(address_of(of, client), port, bool(affinity))
            assert expected == service.plan.endpoints[reached], (client, port)


def test_maglev_distributes_the_connections_of_one_client(
    nodes: tuple[Namespace, Namespace], of: Family
) -> None:
    """By its ports. 300 connections to endpoints of the weights 1, 1 and 2: 7 standard deviations are 52 and
    61."""
    with Service(nodes[0], of, 3) as service:
        service.set(Algorithm.MAGLEV, 1, 1, 2)
        counts = collections.Counter(service.all_reached(300))
    assert 23 <= counts[0] <= 127, counts
    assert 89 <= counts[2] <= 211, counts


def test_maglev_selects_the_same_endpoint_on_all_nodes_and_keeps_most_after_a_removal(
    nodes: tuple[Namespace, Namespace], of: Family
) -> None:
    """As packets of one flow that reach another node: the same address and port."""
    ports = range(20_000, 20_100)
    found: list[list[int]] = []
    for node, endpoints in ((nodes[0], 3), (nodes[1], 3), (nodes[1], 2)):
        with Service(node, of, 3) as service:
            service.set(Algorithm.MAGLEV, endpoints=endpoints)
            found.append([service.reached_by(port) for port in ports])
    assert found[0] == found[1]
    kept = [pair for pair in zip(found[1], found[2], strict=True) if pair[0] != 2]
    assert sum(one != other for one, other in kept) <= 0.2 * len(kept)
    assert len(kept) < len(ports)


# With session affinity


@pytest.mark.parametrize(
    "algorithm", [Algorithm.RANDOM, Algorithm.ROUND_ROBIN, Algorithm.SOURCE_HASH, Algorithm.MAGLEV]
)
def test_a_known_client_stays_at_its_endpoint_whatever_the_algorithm_and_the_weights(
    nodes: tuple[Namespace, Namespace], of: Family, algorithm: Algorithm
) -> None:
    with Service(nodes[0], of, 3) as service:
        service.set(Algorithm.ROUND_ROBIN, affinity=AFFINITY)
        before = [service.reached(client) for client in (1, 2, 3)]
        assert before == [0, 1, 2]
        service.set(algorithm, 1, 5, 9, affinity=AFFINITY)
        for _ in range(5):
            assert [service.reached(client) for client in (1, 2, 3)] == before


def test_new_clients_with_affinity_are_distributed_in_turn_by_weight(
    nodes: tuple[Namespace, Namespace], of: Family
) -> None:
    with Service(nodes[0], of, 3) as service:
        service.set(Algorithm.ROUND_ROBIN, 3, 1, 2, affinity=AFFINITY)
        counts = collections.Counter(service.reached(client) for client in range(12))
    assert counts == {0: 6, 1: 2, 2: 4}


def test_new_clients_with_affinity_are_distributed_by_chance_and_weight(
    nodes: tuple[Namespace, Namespace], of: Family
) -> None:
    """As without session affinity."""
    with Service(nodes[0], of, 2) as service:
        service.set(Algorithm.RANDOM, 3, 1, affinity=AFFINITY)
        counts = collections.Counter(service.reached(client) for client in range(400))
    assert 240 <= counts[0] <= 360, counts


# Changes


STATES: Sequence[tuple[Algorithm | None, tuple[int, ...], int]] = (
    (None, (), 3),
    (Algorithm.ROUND_ROBIN, (), 3),
    (Algorithm.ROUND_ROBIN, (7, 1, 3), 3),
    (Algorithm.SOURCE_HASH, (), 3),
    (Algorithm.SOURCE_HASH, (9, 1), 2),
    (Algorithm.SOURCE_HASH, (), 1),
    (Algorithm.MAGLEV, (), 3),
    (Algorithm.MAGLEV, (5, 1), 2),
    (Algorithm.MAGLEV, (), 1),
    (Algorithm.RANDOM, (1, 5, 2), 3),
    (Algorithm.ROUND_ROBIN, (2, 1), 2),
)


CHANGES = (*STATES, *reversed(STATES))


@pytest.mark.parametrize("affinity", [0, AFFINITY])
def test_no_connection_fails_while_algorithms_weights_and_endpoints_change(
    nodes: tuple[Namespace, Namespace], of: Family, affinity: int
) -> None:
    ended = threading.Event()
    failures: list[Exception] = []
    connected = 0
    with Service(nodes[0], of, 3) as service:
        service.set(None, affinity=affinity)

        def connect_all_the_time() -> None:
            nonlocal connected
            with nodes[0].entered():
                while not ended.wait(0.002):  # else a busy client uses up its ports during the changes
                    try:
                        service.reached(connected % 50)
                        connected += 1
                    except Exception as failure:
                        failures.append(failure)

        thread = threading.Thread(target=connect_all_the_time)
        thread.start()
        try:
            for algorithm, weights, endpoints in CHANGES * 3:
                service.set(algorithm, *weights, affinity=affinity, endpoints=endpoints)
        finally:
            ended.set()
            thread.join()
    assert not failures
    assert connected > len(CHANGES)


@pytest.mark.parametrize("affinity", [0, AFFINITY])
def test_no_connection_fails_between_the_parts_of_a_large_change(
    nodes: tuple[Namespace, Namespace], of: Family, monkeypatch: pytest.MonkeyPatch, affinity: int
) -> None:
    """Rules and lists then change one after the other: the modulus may be greater than the list is long."""
    monkeypatch.setattr(table, "_LARGE", 0)
    commit = Session.commit
    with Service(nodes[0], of, 3) as service:

        def committed(session: Session, operations: Sequence[Operation]) -> list[Rejection]:
            rejections = commit(session, operations)
            for client in range(40):
                service.reached(client)
            return rejections

        service.set(None, affinity=affinity)
        monkeypatch.setattr(Session, "commit", committed)
        for algorithm, weights, endpoints in CHANGES:
            service.set(algorithm, *weights, affinity=affinity, endpoints=endpoints)


def test_exchanged_weights_keep_the_rules(nodes: tuple[Namespace, Namespace], of: Family) -> None:
    """So the counter of round robin continues, and the kernel need not validate the table."""
    with Service(nodes[0], of, 2) as service:
        service.set(Algorithm.ROUND_ROBIN, 3, 1)
        before = service.backend.read()
        service.set(Algorithm.ROUND_ROBIN, 1, 3)
        after = service.backend.read()
    changed = [key for key in before if before[key] != after[key]]
    assert before.keys() == after.keys()
    assert len(changed) == 1
    assert not isinstance(changed[0], Chain)


def test_a_restart_continues_the_turn(nodes: tuple[Namespace, Namespace], of: Family) -> None:
    """A restarted agent finds nothing to change, and so writes nothing."""
    with Service(nodes[0], of, 3) as service:
        service.set(Algorithm.ROUND_ROBIN, 2, 1, 1)
        assert service.all_reached(2) == [0, 1]
        with contextlib.closing(NftablesBackend()) as restarted:
            restarted.open()
            delta = diff(restarted.read(), restarted.render([service.plan], NodePlan()))
        assert not delta
        assert service.all_reached(4) == [2, 0, 0, 1]
