"""How the socket path selects endpoints: distribution over many connections, and what one client gets."""

import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.lab import Netns, manifests
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, format_address
from tests.kernel.clients import UDP, connected, socket_in
from tests.kernel.cluster import Cluster
from tests.support.distribution import CONNECTIONS, assert_equal_turns, assert_in_proportion

pytestmark = [pytest.mark.kernel, pytest.mark.backends("ebpf")]

SO_COOKIE = 57
PORT = 53
EQUAL = {f"192.0.2.{number}": 1 for number in range(101, 111)}
WEIGHTED = {each: 1 + number % 3 for number, each in enumerate(EQUAL)}
sizes = pytest.mark.parametrize("weights", [EQUAL, WEIGHTED], ids=["equal", "weighted"])


def serve(
    cluster: Cluster, weights: dict[str, int], spec: dict[str, str] | None = None, **annotations: str
) -> str:
    """A Service with endpoints that need not exist, since connect() of UDP sends nothing. Returns its
    address."""
    service = cluster.service()
    rules = ",".join(f"{each}={weight}" for each, weight in weights.items())
    annotations = {f"ebpfproxy/{key.replace('_', '-')}": text for key, text in annotations.items()}
    annotations["ebpfproxy/endpoint-weights"] = rules
    udp = [manifests.port(PORT, protocol="UDP", name="udp")]
    cluster.write(
        service.name,
        manifests.service(service.name, [service.v4], udp, annotations=annotations, **(spec or {})),
        manifests.endpoint_slice(f"{service.name}-v4", service.name, list(weights), udp),
    )
    return service.v4


def map_of(cluster: Cluster, name: str) -> Map:
    return Map.pinned(Pins(cluster.lab.bpffs).hooked_in() / "maps" / name)


@contextlib.contextmanager
def connecting(cluster: Cluster, netns: Netns) -> Iterator[Callable[[str], str]]:
    """A function that connects a socket of `netns` to an address, and returns the selected endpoint."""
    peers = map_of(cluster, "socket_peers")
    places, size = peers.shape.max_entries, abi.SOCKET_PEER.size
    client = socket_in(netns, UDP)
    cookie = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")
    with contextlib.closing(peers), client, contextlib.closing(peers.mapped()) as memory:

        def connect(address: str) -> str:
            client.connect((address, PORT))
            for way in range(abi.SOCKET_WAYS):
                at = (cookie + way) % places * size
                found = abi.SOCKET_PEER.unpack_from(memory, at)
                if found[0] == cookie:
                    return format_address(Address(found[1]))
            raise AssertionError("the socket has no entry")

        yield connect


def sample(cluster: Cluster, address: str, count: int = CONNECTIONS) -> Counter[str]:
    with connecting(cluster, cluster.p) as connect:
        return Counter(connect(address) for _ in range(count))


@sizes
@pytest.mark.parametrize("algorithm", ["random", "maglev", "mh"])
def test_connections_are_distributed_in_proportion_to_weights(
    cluster: Cluster, algorithm: str, weights: dict[str, int]
) -> None:
    """maglev has no port of the client here, so a random number takes its place."""
    address = serve(cluster, weights, lb_algorithm=algorithm)
    assert_in_proportion(sample(cluster, address), weights)


@sizes
@pytest.mark.parametrize("algorithm", ["round-robin", "wrr"])
def test_round_robin_gives_each_endpoint_its_exact_share(
    cluster: Cluster, algorithm: str, weights: dict[str, int]
) -> None:
    address = serve(cluster, weights, lb_algorithm=algorithm)
    assert_equal_turns(sample(cluster, address), weights)


def test_source_hash_keeps_the_endpoint_of_a_pod(cluster: Cluster) -> None:
    address = serve(cluster, EQUAL, lb_algorithm="source-hash")
    assert len(sample(cluster, address, 50)) == 1


def test_source_hash_distributes_pods(cluster: Cluster) -> None:
    """Both pods get the same endpoint of 20 Services with different endpoints once in 10^20 runs."""

    def differ(number: int) -> bool:
        endpoints = {f"192.0.2.{number * 10 + each}": 1 for each in range(10)}
        address = serve(cluster, endpoints, lb_algorithm="sh")
        found = set()
        for pod in (cluster.p, cluster.q):
            with connecting(cluster, pod) as connect:
                found.add(connect(address))
        return len(found) == 2

    assert any(differ(number) for number in range(1, 21))


def counted(cluster: Cluster) -> list[int]:
    """The numbers of open connections of all counted endpoints, sorted."""
    with contextlib.closing(map_of(cluster, "connections")) as connections:
        return sorted(int.from_bytes(value, "little") for _, value in connections.items())


def test_least_connections_counts_open_sockets(cluster: Cluster) -> None:
    address = serve(cluster, EQUAL, lb_algorithm="least-connections")
    assert counted(cluster) == [0] * len(EQUAL)
    with contextlib.ExitStack() as opened:
        for number in range(1, 401):
            opened.enter_context(connected(cluster.p, UDP, address, PORT))
            assert sum(counted(cluster)) == number
        assert max(counted(cluster)) - min(counted(cluster)) < 10
    assert counted(cluster) == [0] * len(EQUAL)


def test_least_connections_counts_a_socket_that_connects_again_once(cluster: Cluster) -> None:
    address = serve(cluster, EQUAL, lb_algorithm="lc")
    other = serve(cluster, EQUAL, lb_algorithm="random")
    with connecting(cluster, cluster.p) as connect:
        for _ in range(50):
            connect(address)
            assert sum(counted(cluster)) == 1
        connect(other)
        assert sum(counted(cluster)) == 0


def test_closing_a_socket_does_not_change_the_count_of_another_endpoint_with_its_id(cluster: Cluster) -> None:
    """A walk that counts again may come in between, once in ten seconds."""
    address = serve(cluster, {"192.0.2.101": 1}, lb_algorithm="least-connections")
    with contextlib.closing(map_of(cluster, "connections")) as connections:
        ((id_, _),) = connections.items()

    def count_after_reuse() -> list[int]:
        with contextlib.closing(map_of(cluster, "endpoints")) as endpoints:
            before = endpoints.lookup(id_)
            assert before
            try:
                with connected(cluster.p, UDP, address, PORT):
                    assert counted(cluster) == [1]
                    target, *others = abi.ENDPOINT.unpack(before)
                    endpoints.update(id_, abi.ENDPOINT.pack(target[::-1], *others))
                return counted(cluster)
            finally:
                endpoints.update(id_, before)
                with contextlib.closing(map_of(cluster, "connections")) as connections:
                    connections.update(id_, bytes(4))

    assert any(count_after_reuse() == [1] for _ in range(3))


def test_session_affinity_has_precedence(cluster: Cluster) -> None:
    address = serve(cluster, EQUAL, {"sessionAffinity": "ClientIP"}, lb_algorithm="round-robin")
    assert len(sample(cluster, address, 50)) == 1


def test_an_annotation_that_changes_is_in_force_for_the_next_connection(cluster: Cluster) -> None:
    exposed = cluster.service().to(cluster.a, cluster.b, cluster.c)
    for algorithm, least in (("source-hash", 1), ("rr", 20), ("sh", 1), ("mh", 2), ("", 2)):
        exposed.annotations = {"ebpfproxy/lb-algorithm": algorithm}
        exposed.to(*exposed.backends)
        found = sample(cluster, exposed.v4, 60)
        assert len(found) == (1 if least == 1 else 3)
        assert min(found.values()) >= least
