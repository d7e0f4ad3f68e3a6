"""How the packet path selects endpoints: distribution over many flows, and what equal clients get."""

import dataclasses
import random
import struct
import time
from collections import Counter
from collections.abc import Iterator
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.services.client_hash import client_hash, entry_of
from ebpfproxy.backends.ebpf.services.slot_lists import TABLE_SIZES
from ebpfproxy.model.address import Protocol, parse_address
from ebpfproxy.model.balancing import Algorithm, Balancing, parse_weights
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.plan.maglev import table
from tests.kernel.packet_path.conversation import request
from tests.kernel.packet_path.served import families
from tests.support.bpf_place import bpf_place
from tests.support.build import HERE, endpoint, port, service, slice_of
from tests.support.distribution import CONNECTIONS, assert_equal_turns, assert_in_proportion
from tests.support.packet_path import SIZES, PacketPath, packet_path
from tests.support.packets import V4, V6, Places

pytestmark = pytest.mark.kernel

_U32 = struct.Struct("=I")
UDP = Protocol.UDP
ADDRESS = {V4: (AF_INET, 26, 30, 34), V6: (AF_INET6, 22, 38, 54)}
"""By family: where a frame has its source, destination and source port."""
WEIGHTS = {number: 1 + number % 3 for number in range(1, 11)}


@pytest.fixture(scope="module")
def _roomy() -> Iterator[PacketPath]:
    with bpf_place() as place, packet_path(place, dataclasses.replace(SIZES, slots=65536)) as made:
        yield made


@pytest.fixture
def path(_roomy: PacketPath) -> PacketPath:
    _roomy.start_over()
    return _roomy


def name(at: Places, number: int) -> str:
    """The address of an endpoint on this node."""
    return f"10.244.1.{100 + number}" if at is V4 else f"fd00:1::{100 + number:x}"


def serve(
    path: PacketPath,
    at: Places,
    algorithm: Algorithm,
    weights: dict[int, int],
    affinity: int = 0,
    slow_start: int = 0,
) -> dict[str, int]:
    """A Service whose endpoints have these weights, by number. Returns the weights by address."""
    by_name = {name(at, number): weight for number, weight in weights.items()}
    rules = parse_weights(",".join(f"{each}={weight}" for each, weight in by_name.items()))
    udp = port(53, "udp", protocol=UDP)
    web = dataclasses.replace(
        service("web", udp, ips=[at.cluster], external=[at.external], affinity=affinity),
        balancing=Balancing(algorithm, rules, slow_start),
    )
    endpoints = [endpoint(each, HERE) for each in by_name]
    path.serve(web, slice_of("web", *endpoints, ports=[EndpointPort("udp", UDP, 5353)]))
    return by_name


class Client:
    """Sends the first datagrams of many flows from outside."""

    def __init__(self, path: PacketPath, at: Places) -> None:
        self._family, self._source_at, self._destination_at, self._port_at = ADDRESS[at]
        self._frame = bytearray(bytes(request(at, UDP)))
        assert self._frame[self._source_at :].startswith(inet_pton(self._family, at.client))
        self._runs = path.runs_in("net")

    def endpoint(self, address: str, port: int) -> str:
        """The endpoint that a flow gets. Checksums are not valid, which the programs do not notice."""
        packed, frame = inet_pton(self._family, address), self._frame
        frame[self._source_at : self._source_at + len(packed)] = packed
        frame[self._port_at : self._port_at + 2] = port.to_bytes(2, "big")
        _, result = self._runs.run(bytes(frame))
        end = self._destination_at + len(packed)
        return inet_ntop(self._family, bytes(result[self._destination_at : end]))


def clients(at: Places, seed: int) -> Iterator[tuple[str, int]]:
    """Addresses and ports, all different."""
    source = random.Random(seed)
    prefix = "198.51." if at is V4 else "2001:db8:99::"
    seen = set()
    while True:
        number, port = source.randrange(1 << 16), source.randrange(1024, 1 << 16)
        if (number, port) not in seen:
            seen.add((number, port))
            yield prefix + (f"{number >> 8}.{number & 255}" if at is V4 else f"{number:x}"), port


def counted(path: PacketPath) -> dict[int, int]:
    """The numbers of open connections by endpoint id."""
    return {_U32.unpack(k)[0]: _U32.unpack(v)[0] for k, v in path.maps["connections"].items()}


def sample(path: PacketPath, at: Places, count: int = CONNECTIONS) -> Counter[str]:
    client, source = Client(path, at), clients(at, 1)
    return Counter(client.endpoint(*next(source)) for _ in range(count))


@families
@pytest.mark.parametrize("weights", [dict.fromkeys(WEIGHTS, 1), WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("algorithm", [Algorithm.RANDOM, Algorithm.SOURCE_HASH, Algorithm.MAGLEV])
def test_flows_are_distributed_in_proportion_to_weights(
    path: PacketPath, at: Places, algorithm: Algorithm, weights: dict[int, int]
) -> None:
    """For source-hash, each client has one port here: the addresses are what is distributed."""
    by_name = serve(path, at, algorithm, weights)
    if algorithm is Algorithm.SOURCE_HASH:
        client = Client(path, at)
        prefix = "10.{}.{}.{}" if at is V4 else "2001:db8:{:x}:{:x}::{:x}"
        addresses = (prefix.format(9, number >> 8 & 255, number & 255) for number in range(1 << 16))
        found = Counter(client.endpoint(each, 40000) for each in addresses)
    else:
        found = sample(path, at)
    assert_in_proportion(found, by_name)


@families
@pytest.mark.parametrize("weights", [dict.fromkeys(WEIGHTS, 1), WEIGHTS], ids=["equal", "weighted"])
def test_round_robin_gives_each_endpoint_its_exact_share(
    path: PacketPath, at: Places, weights: dict[int, int]
) -> None:
    by_name = serve(path, at, Algorithm.ROUND_ROBIN, weights)
    assert_equal_turns(sample(path, at), by_name)


@families
@pytest.mark.parametrize("weights", [dict.fromkeys(WEIGHTS, 1), WEIGHTS], ids=["equal", "weighted"])
def test_least_connections_keeps_the_numbers_of_open_flows_in_proportion(
    path: PacketPath, at: Places, weights: dict[int, int]
) -> None:
    """With two choices, the largest deviation is a few flows, where random selections deviate by hundreds."""
    by_name = serve(path, at, Algorithm.LEAST_CONNECTIONS, weights)
    found, of = sample(path, at), sum(by_name.values())
    for each, weight in by_name.items():
        assert abs(found[each] / weight - CONNECTIONS / of) < 15


def test_least_connections_prefers_the_endpoint_with_fewer_open_flows(path: PacketPath) -> None:
    """Only if both choices are the endpoint with more flows, it is selected: with probability 1/4."""
    serve(path, V4, Algorithm.LEAST_CONNECTIONS, {1: 1, 2: 1})
    for at, id_ in enumerate(counted(path)):
        path.maps["connections"].update(_U32.pack(id_), _U32.pack(1000 * at))
    assert sorted(sample(path, V4, 400).values()) == pytest.approx([100, 300], abs=60)


def test_an_endpoint_without_a_number_has_no_open_connection(path: PacketPath) -> None:
    """For example if the map has no room for it."""
    serve(path, V4, Algorithm.LEAST_CONNECTIONS, {1: 1, 2: 1})
    client, source = Client(path, V4), clients(V4, 1)
    missing, other = counted(path)
    path.maps["connections"].delete(_U32.pack(missing))
    found: Counter[str] = Counter()
    for _ in range(400):
        path.maps["connections"].update(_U32.pack(other), _U32.pack(1))
        found[client.endpoint(*next(source))] += 1
    assert sorted(found.values()) == pytest.approx([100, 300], abs=60)


def test_a_number_below_zero_counts_as_zero(path: PacketPath) -> None:
    """CPUs that count down at the same time can cause it."""
    serve(path, V4, Algorithm.LEAST_CONNECTIONS, {1: 1, 2: 1})
    below, other = sorted(counted(path))
    path.maps["connections"].update(_U32.pack(below), struct.pack("=i", -1000))
    path.maps["connections"].update(_U32.pack(other), _U32.pack(1000))
    assert sorted(sample(path, V4, 400).values()) == pytest.approx([100, 300], abs=60)
    assert counted(path)[other] == pytest.approx(1100, abs=60)


def test_a_walk_counts_open_flows_again(path: PacketPath) -> None:
    serve(path, V4, Algorithm.LEAST_CONNECTIONS, {1: 1, 2: 1, 3: 1})
    sample(path, V4, 300)
    right = counted(path)
    assert sum(right.values()) == 300
    for id_ in right:
        path.maps["connections"].update(_U32.pack(id_), _U32.pack(7777))
    path.sweep_and_count()
    assert counted(path) == right
    path.forget_flows()
    path.sweep_and_count()
    assert set(counted(path).values()) == {0}


def entry_of_endpoint(path: PacketPath, id_: int) -> bytes:
    found = path.maps["endpoints"].lookup(_U32.pack(id_))
    assert found
    return found


def write_peer(path: PacketPath, id_: int, cookie: int = 1) -> None:
    """A socket that is connected to this endpoint. Cookie 0 removes it."""
    address, port, _, service = abi.ENDPOINT.unpack(entry_of_endpoint(path, id_))
    to_endpoint = cookie, address, port, UDP, 0, service
    peer = abi.SOCKET_PEER.pack(*to_endpoint, bytes(16), 0, 1, id_, 0)
    path.maps["socket_peers"].update(_U32.pack(1), peer)


def test_a_walk_does_not_count_connections_to_a_previous_endpoint_of_the_same_id(path: PacketPath) -> None:
    serve(path, V4, Algorithm.LEAST_CONNECTIONS, {1: 1, 2: 1})
    reused, other = sorted(counted(path))
    sample(path, V4, 40)
    right = counted(path)
    write_peer(path, reused)
    path.sweep_and_count()
    assert counted(path) == {reused: right[reused] + 1, other: right[other]}
    address, *others = abi.ENDPOINT.unpack(entry_of_endpoint(path, reused))
    path.maps["endpoints"].update(_U32.pack(reused), abi.ENDPOINT.pack(address[::-1], *others))
    path.sweep_and_count()
    assert counted(path) == {reused: 0, other: right[other]}
    write_peer(path, reused, cookie=0)


def test_a_walk_skips_an_entry_of_another_program(path: PacketPath) -> None:
    serve(path, V4, Algorithm.LEAST_CONNECTIONS, {1: 1})
    beyond = path.maps["endpoints"].shape.max_entries + 4096
    path.maps["connections"].update(_U32.pack(beyond), _U32.pack(3))
    sample(path, V4, 5)
    path.sweep_and_count()
    assert sorted(counted(path).values()) == [3, 5]
    path.maps["connections"].delete(_U32.pack(beyond))


def test_a_service_that_changes_its_algorithm_is_no_longer_counted(path: PacketPath) -> None:
    serve(path, V4, Algorithm.LEAST_CONNECTIONS, {1: 1, 2: 1})
    assert len(counted(path)) == 2
    serve(path, V4, Algorithm.RANDOM, {1: 1, 2: 1})
    sample(path, V4, 20)
    assert not counted(path)


def test_round_robin_takes_turns(path: PacketPath) -> None:
    serve(path, V4, Algorithm.ROUND_ROBIN, {1: 1, 2: 1, 3: 1})
    client, source = Client(path, V4), clients(V4, 2)
    found = [client.endpoint(*next(source)) for _ in range(9)]
    assert len(set(found[:3])) == 3
    assert found[:3] * 3 == found


@families
def test_source_hash_sends_all_flows_of_an_address_to_one_endpoint(path: PacketPath, at: Places) -> None:
    serve(path, at, Algorithm.SOURCE_HASH, WEIGHTS)
    client = Client(path, at)
    for address in [at.client, at.router]:
        assert len({client.endpoint(address, port) for port in range(20_000, 20_200)}) == 1


def test_maglev_distributes_the_flows_of_one_address(path: PacketPath) -> None:
    serve(path, V4, Algorithm.MAGLEV, dict.fromkeys(WEIGHTS, 1))
    client = Client(path, V4)
    assert len({client.endpoint(V4.client, port) for port in range(20_000, 20_200)}) == len(WEIGHTS)


@families
@pytest.mark.parametrize("algorithm", [Algorithm.SOURCE_HASH, Algorithm.MAGLEV])
def test_another_node_selects_the_same_endpoint(path: PacketPath, at: Places, algorithm: Algorithm) -> None:
    """What another node selects depends only on its own copy of table and hash, so does what is computed
    here."""
    by_name = serve(path, at, algorithm, WEIGHTS)
    names = sorted(by_name, reverse=True)
    targets = [bytes(parse_address(each)) + (5353).to_bytes(2, "big") for each in names]
    entries = table(targets, [by_name[each] for each in names], TABLE_SIZES.of(len(targets)))
    client, source = Client(path, at), clients(at, 3)
    for address, source_port in (next(source) for _ in range(2000)):
        hashed = client_hash(parse_address(address), source_port if algorithm is Algorithm.MAGLEV else 0)
        assert client.endpoint(address, source_port) == names[entries[entry_of(hashed, len(entries))]]


def test_maglev_keeps_flows_when_one_of_100_endpoints_is_removed(path: PacketPath) -> None:
    """The flows are forgotten in between, as if all packets reached another node."""
    weights = dict.fromkeys(range(1, 101), 1)
    flows = [each for each, _ in zip(clients(V4, 4), range(1000), strict=False)]
    serve(path, V4, Algorithm.MAGLEV, weights)
    before = [Client(path, V4).endpoint(*flow) for flow in flows]
    path.forget_flows()
    del weights[50]
    serve(path, V4, Algorithm.MAGLEV, weights)
    after = [Client(path, V4).endpoint(*flow) for flow in flows]
    others = [pair for pair in zip(before, after, strict=True) if pair[0] != name(V4, 50)]
    assert 0 < len(others) < len(flows)
    assert sum(1 for one, other in others if one != other) <= 0.02 * len(others)


@pytest.mark.parametrize("algorithm", [Algorithm.ROUND_ROBIN, Algorithm.MAGLEV])
def test_session_affinity_has_precedence(path: PacketPath, algorithm: Algorithm) -> None:
    serve(path, V4, algorithm, WEIGHTS, affinity=3600)
    client = Client(path, V4)
    assert len({client.endpoint(V4.client, port) for port in range(20_000, 20_050)}) == 1
    found = {client.endpoint(f"10.9.8.{number}", 40000) for number in range(250)}
    assert found == {name(V4, number) for number in WEIGHTS}


# Slow start


SLOW = 3600  # much longer than a test
THREE, FOUR = dict.fromkeys(range(1, 4), 1), dict.fromkeys(range(1, 5), 1)


def set_age(path: PacketPath, seconds: float) -> None:
    """Make the only new endpoint be so old."""
    ((key, _),) = path.maps["new_endpoints"].items()
    added = time.monotonic_ns() - int(seconds * 1e9)  # negative soon after boot; the programs wrap as well
    path.maps["new_endpoints"].update(key, struct.pack("=q", added))


@pytest.mark.parametrize("algorithm", [Algorithm.RANDOM, Algorithm.ROUND_ROBIN, Algorithm.LEAST_CONNECTIONS])
def test_the_share_of_a_new_endpoint_grows_with_its_age(path: PacketPath, algorithm: Algorithm) -> None:
    """An endpoint that is not admitted is selected in the last of four tries only. With least-connections it
    is chosen more often, since it has fewer connections."""
    serve(path, V4, algorithm, THREE, slow_start=SLOW)
    serve(path, V4, algorithm, FOUR, slow_start=SLOW)
    shares = []
    for age in (0, SLOW / 2, 2 * SLOW):
        set_age(path, age)
        for id_ in counted(path):
            path.maps["connections"].update(_U32.pack(id_), _U32.pack(0))
        shares.append(sample(path, V4, 2000)[name(V4, 4)] / 2000)
        path.forget_flows()
    assert shares[0] < 0.06
    assert 0.08 < shares[1] < (0.29 if algorithm is Algorithm.LEAST_CONNECTIONS else 0.22)
    assert shares[2] == pytest.approx(1 / 4, abs=0.05)


def test_the_share_grows_during_the_longest_slow_start_as_well(path: PacketPath) -> None:
    """The longest duration of an option: in ns, it leaves no room for a factor of 32 bits."""
    longest = (1 << 31) - 1
    serve(path, V4, Algorithm.RANDOM, THREE, slow_start=longest)
    serve(path, V4, Algorithm.RANDOM, FOUR, slow_start=longest)
    set_age(path, longest / 10)
    assert 0 < sample(path, V4, 2000)[name(V4, 4)] / 2000 < 0.06


def test_the_first_endpoints_of_a_service_have_no_slow_start(path: PacketPath) -> None:
    serve(path, V4, Algorithm.RANDOM, FOUR, slow_start=SLOW)
    assert not list(path.maps["new_endpoints"].items())


@pytest.mark.parametrize("algorithm", [Algorithm.SOURCE_HASH, Algorithm.MAGLEV])
def test_hashes_have_no_slow_start(path: PacketPath, algorithm: Algorithm) -> None:
    serve(path, V4, algorithm, THREE, slow_start=SLOW)
    serve(path, V4, algorithm, FOUR, slow_start=SLOW)
    assert not list(path.maps["new_endpoints"].items())


@pytest.mark.parametrize("ends_with", ["endpoint", "request"])
def test_slow_start_ends_with_the_endpoint_or_the_request(path: PacketPath, ends_with: str) -> None:
    serve(path, V4, Algorithm.RANDOM, THREE, slow_start=SLOW)
    serve(path, V4, Algorithm.RANDOM, FOUR, slow_start=SLOW)
    assert len(list(path.maps["new_endpoints"].items())) == 1
    if ends_with == "endpoint":
        serve(path, V4, Algorithm.RANDOM, THREE, slow_start=SLOW)
    else:
        serve(path, V4, Algorithm.RANDOM, FOUR)
    assert not list(path.maps["new_endpoints"].items())


def test_all_endpoints_may_be_new(path: PacketPath) -> None:
    serve(path, V4, Algorithm.RANDOM, {9: 1}, slow_start=SLOW)
    serve(path, V4, Algorithm.RANDOM, FOUR, slow_start=SLOW)
    assert len(list(path.maps["new_endpoints"].items())) == 4
    assert set(sample(path, V4, 400)) == {name(V4, number) for number in FOUR}
