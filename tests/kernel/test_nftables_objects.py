"""`nft` lists each entry with the same text as it was written, and the kernel applies it as intended."""

import collections
import contextlib
import dataclasses
import itertools
import json
import select
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.nftables import node_objects
from ebpfproxy.backends.nftables.backend import NftablesBackend, render
from ebpfproxy.backends.nftables.entries import (
    TABLE,
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Endpoints,
    Entry,
    FlowtableDevice,
    Key,
    Map,
    Set,
    nft_family,
)
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.linux.netlink.netlink import attributes, text
from ebpfproxy.linux.nft.messages import HEAD, Kind, Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    Protocol,
    format_address,
    parse_address,
    parse_network,
)
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    LocalTraffic,
    NodePlan,
    NoEndpointAction,
    PlannedEndpoint,
    PlannedEndpoints,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.golden.nftables_text import entries_of
from tests.golden.situation import load, situations
from tests.kernel.loopback import add_addresses
from tests.support.namespace import Namespace, namespace
from tests.support.nft_listing import declaration_text, element_text, endpoint_elements, parse

pytestmark = pytest.mark.kernel

SETTINGS = NftablesSettings()
KEPT = PolicyResult(Scope.CLUSTER, False)
LABEL = "a" * 63
EMPTIED = "\n".join(
    f"{verb} table {nft_family(of)} {TABLE}" for of in Family for verb in ("add", "delete", "add")
)
"""Commands that empty both tables."""


@pytest.fixture(scope="module")
def node() -> Iterator[Namespace]:
    """A node with a default route that leads nowhere. It has the pods' addresses itself."""
    with namespace("nftables-objects") as made:
        made.ip("link set lo up", "addr add 192.0.2.10/32 dev lo", "route add local 10.1.0.0/16 dev lo")
        made.ip("link add uplink type veth peer name nowhere", "link set uplink up", "link set nowhere up")
        made.ip("route add default dev uplink src 192.0.2.10")
        with made.entered():
            add_addresses("2001:db8::10", "fd01::1", "fd01::2", "fd01::3")
        made.ip("route add default dev uplink src 2001:db8::10")
        yield made


def nft(*words: str, given: str = "") -> str:
    done = subprocess.run(
        ["nft", *words], input=given, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(entries: Mapping[Key, Entry]) -> str:
    """The commands that create the entries; each one follows those that it refers to."""
    declared, ruled, filled = [], [], []
    for key, entry in entries.items():
        at = f"{nft_family(key.family)} {TABLE}"
        if isinstance(key, Element):
            assert isinstance(entry, ElementEntry)
            filled.append(f"add element {at} {key.container} {{ {element_text(key, entry)} }}")
        elif isinstance(key, Endpoints):
            elements = ", ".join(endpoint_elements(key, entry))
            filled.append(f"add element {at} {key.container} {{ {elements} }}")
        elif isinstance(key, FlowtableDevice):
            raise AssertionError(f"{key}: these settings have no flowtable")
        elif isinstance(key, Chain):
            assert isinstance(entry, ChainEntry)
            hook = f" {{ {entry.hook} }}" if entry.hook else ""
            declared.append(f"add chain {at} {key.name}{hook}")
            ruled += [f"add rule {at} {key.name} {rule}" for rule in entry.rules]
        elif isinstance(key, Set | Map):
            declared.append(f"add {key.kind} {at} {key.name} {{ {declaration_text(entry)} }}")
    return "\n".join([*declared, *ruled, *filled, ""])


def load_into_kernel(entries: Mapping[Key, Entry]) -> None:
    """Replaces the tables' content, in the network namespace of the calling thread."""
    nft("-f", "-", given=f"{EMPTIED}\n{written(entries)}")


def listed(*flags: str) -> dict[Key, Entry]:
    found: dict[Key, Entry] = {}
    for of in Family:
        found |= parse(nft(*flags, "list", "table", nft_family(of), TABLE), of)
    return found


def check(node: Namespace, entries: Mapping[Key, Entry]) -> None:
    with node.entered():
        load_into_kernel(entries)
        for flags in ((), ("-y", "-T"), ("-y", "-T", "-p")):
            assert listed(*flags) == entries


@pytest.mark.parametrize("case", situations())
def test_the_entries_of_each_situation_are_listed_as_written(node: Namespace, case: str) -> None:
    check(node, entries_of(load(case)))


def test_the_rules_of_all_situations_have_the_expressions_of_nft(node: Namespace) -> None:
    """The rules that nft adds for the texts, and those of the backend. For hashes, nft uses other registers;
    sets of rules have other names."""
    compared = 0
    with node.entered(), Session() as session, contextlib.closing(NftablesBackend(SETTINGS)) as plane:
        plane.open()
        for situation in situations():
            entries = entries_of(load(situation))
            load_into_kernel(entries)
            of_nft = rule_expressions(session)
            nft("-f", "-", given=EMPTIED)
            rejected = plane.apply(diff(plane.read(), entries))
            written = rule_expressions(session)
            for key, entry in entries.items() if not rejected else ():
                if isinstance(key, Chain) and isinstance(entry, ChainEntry):
                    at = nft_family(key.family), key.name
                    for rule, one, other in zip(entry.rules, written[at], of_nft[at], strict=True):
                        if " { " not in rule.text and "jhash" not in rule.text:
                            assert one == other, rule
                            compared += 1
    assert compared > 1000


def rule_expressions(session: Session) -> dict[tuple[str, str], list[bytes]]:
    """NFTA_RULE_EXPRESSIONS of each rule, by family and chain."""
    found = collections.defaultdict(list)
    for payload in session.dump(Kind.GET_RULE):
        parts = dict(attributes(payload, HEAD.size))
        of = {Table(of, "").number: of for of in ("ip", "ip6")}[payload[0]]
        found[of, text(parts[2])].append(parts[4])
    return found


@pytest.mark.same_for("bit")
@pytest.mark.parametrize("bit", range(32))
def test_every_masquerade_bit_is_listed_as_written(node: Namespace, bit: int) -> None:
    check(node, render((), NodePlan(), NftablesSettings(bit)))


RANGES = {
    Family.IPV4: (
        "0.0.0.0/1",
        "64.0.0.0/2",
        "128.0.0.0/1",
        "192.0.2.0/24",
        "192.0.3.0/24",
        "192.0.4.0/24",
        "192.0.2.7/32",
        "192.0.2.8/32",
        "255.255.255.255/32",
    ),
    Family.IPV6: (
        "::/16",
        "fc00::/7",
        "fe00::/8",
        "ff00::/8",
        "2001:db8::/32",
        "2001:db8::1/128",
        "8000::/1",
    ),
}


@pytest.mark.parametrize("of", Family)
def test_source_ranges_are_listed_as_written(node: Namespace, of: Family) -> None:
    networks = list(map(parse_network, RANGES[of]))
    some = [
        port_plan(of, number, ranges=chosen)
        for number, chosen in enumerate(
            itertools.chain(*(itertools.combinations(networks, size) for size in (1, 2, 3)))
        )
    ]
    check(node, render(some, NodePlan(), SETTINGS))


@pytest.mark.parametrize("of", Family)
@pytest.mark.parametrize("affinity", [0, 86399])
def test_many_endpoints_are_listed_as_written(node: Namespace, of: Family, affinity: int) -> None:
    check(node, render([port_plan(of, 0, endpoints=600, affinity=affinity)], NodePlan(), SETTINGS))


@pytest.mark.parametrize(
    "traffic",
    [
        LocalTraffic(parse_network("0.0.0.0/0")),
        LocalTraffic(parse_network("10.1.0.1/32")),
        LocalTraffic(interface="br-0.1@x"),
        LocalTraffic(interface="a" * 15, prefix=True),
        LocalTraffic(interface="a" * 14, prefix=True),
    ],
    ids=str,
)
def test_local_traffic_detection_is_listed_as_written(node: Namespace, traffic: LocalTraffic) -> None:
    plan = dataclasses.replace(port_plan(Family.IPV4, 0), local_traffic=traffic)
    check(node, render([plan], NodePlan(), SETTINGS))


@pytest.mark.parametrize("of", Family)
@pytest.mark.parametrize("affinity", [0, 1])
@pytest.mark.parametrize("protocol", Protocol)
def test_every_protocol_is_listed_as_written(
    node: Namespace, of: Family, affinity: int, protocol: Protocol
) -> None:
    name = ServicePortName("default", "web", "http", protocol)
    check(node, render([port_plan(of, 0, name, endpoints=3, affinity=affinity)], NodePlan(), SETTINGS))


def test_the_longest_names_are_listed_as_written(node: Namespace) -> None:
    name = ServicePortName(LABEL, LABEL, LABEL, Protocol.SCTP)
    plans = [port_plan(Family.IPV6, 0, name, affinity=1), port_plan(Family.IPV4, 0, name, endpoints=0)]
    check(node, render(plans, NodePlan(), SETTINGS))


def test_node_port_networks_are_listed_as_written(node: Namespace) -> None:
    texts = (
        "192.0.2.10/32 198.51.100.0/24 198.51.101.0/24 203.0.113.0/25 2001:db8::1/128 fd00::/8 255.0.0.0/8"
    )
    networks = frozenset(map(parse_network, texts.split()))
    check(node, render((), NodePlan(networks, networks, (), frozenset()), SETTINGS))


def port_plan(
    of: Family,
    number: int,
    name: ServicePortName | None = None,
    *,
    ranges: tuple[Network, ...] = (),
    endpoints: int = 1,
    affinity: int = 0,
) -> ServicePortPlan:
    cluster_ip, balancer, pods = {
        Family.IPV4: ("10.96.0.10", "203.0.113.5", "10.1.0.0"),
        Family.IPV6: ("fd00::10", "2001:db8:1::5", "fd01::"),
    }[of]
    frontends = (
        frontend(cluster_ip, 1000 + number, FrontendKind.CLUSTER_IP),
        frontend(balancer, 1000 + number, FrontendKind.LOAD_BALANCER)._replace(
            restricted=bool(ranges), source_ranges=ranges, node_admitted=bool(number % 2)
        ),
    )
    first = int.from_bytes(parse_address(pods))
    return ServicePortPlan(
        name or ServicePortName("default", f"web-{number}", "http", Protocol.TCP),
        of,
        frontends,
        PlannedEndpoints(
            PlannedEndpoint(Address((first + 1 + each).to_bytes(16)), 8080, True, False, True)
            for each in range(endpoints)
        ),
        NoEndpointAction.DROP,
        affinity,
    )


def frontend(address: str, port: int, kind: FrontendKind) -> FrontendPlan:
    return FrontendPlan(Frontend(parse_address(address), port, Protocol.TCP), kind, KEPT, KEPT, KEPT)


# --- behavior in the kernel ---


@pytest.fixture
def served(node: Namespace) -> Iterator[ServicePortPlan]:
    """A Service with three endpoints, each with a listener, and with session affinity of ten minutes."""
    plan = port_plan(Family.IPV4, 0, endpoints=3, affinity=600)
    with node.entered():
        load_into_kernel(render([plan], NodePlan(), SETTINGS, [Family.IPV4]))
        listeners = [socket.create_server((f"10.1.0.{number}", 8080)) for number in (1, 2, 3)]
        try:
            yield plan
        finally:
            for listener in listeners:
                listener.close()


def dial(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), timeout=10)


def remembered() -> list[Any]:
    """The clients with session affinity."""
    objects = json.loads(nft("-j", "list", "set", "ip", TABLE, "affinity"))["nftables"]
    (found,) = (each["set"] for each in objects if "set" in each)
    return list(found.get("elem", []))


def test_session_affinity_has_the_timeout_of_the_service(served: ServicePortPlan) -> None:
    with dial("10.96.0.10", 1000):
        pass
    (element,) = remembered()
    assert element["elem"]["val"]["concat"][0] == "192.0.2.10"
    assert element["elem"]["timeout"] == 600
    for _ in range(20):
        with dial("203.0.113.5", 1000):
            pass
    assert len(remembered()) == 1


@pytest.mark.parametrize("of", Family)
def test_a_known_client_stays_at_its_endpoint_until_the_service_loses_it(node: Namespace, of: Family) -> None:
    plan = port_plan(of, 0, endpoints=3, affinity=600)
    with node.entered(), contextlib.ExitStack() as opened, contextlib.closing(NftablesBackend()) as backend:
        backend.open()
        listeners = listening(plan, opened)
        bring(backend, plan)
        (first,) = {reached_endpoint(plan, listeners) for _ in range(20)}
        others = [each for number, each in enumerate(plan.endpoints) if number != first]
        bring(backend, dataclasses.replace(plan, endpoints=PlannedEndpoints(others)))
        (second,) = {reached_endpoint(plan, listeners) for _ in range(20)}
        assert second != first
        bring(backend, dataclasses.replace(plan, endpoints=plan.endpoints[second : second + 1]))
        assert {reached_endpoint(plan, listeners) for _ in range(20)} == {second}


@pytest.mark.parametrize("of", Family)
def test_without_room_for_more_clients_connections_are_spread(
    node: Namespace, monkeypatch: pytest.MonkeyPatch, of: Family
) -> None:
    monkeypatch.setattr(node_objects, "AFFINITY_MAX", 1)
    plan = port_plan(of, 0, endpoints=3, affinity=600)
    client = "192.0.2.77" if of is Family.IPV4 else "2001:db8::77"
    with node.entered(), contextlib.ExitStack() as opened, contextlib.closing(NftablesBackend()) as backend:
        backend.open()
        nft("flush", "ruleset")
        bring(backend, plan)
        key = f"{client} . 1"
        nft("add", "element", nft_family(of), TABLE, "affinity", f"{{ {key} timeout 1h }}")
        listeners = listening(plan, opened)
        assert {reached_endpoint(plan, listeners) for _ in range(60)} == {0, 1, 2}


def bring(backend: NftablesBackend, plan: ServicePortPlan) -> None:
    assert not backend.apply(diff(backend.read(), backend.render([plan], NodePlan())))


def listening(plan: ServicePortPlan, opened: contextlib.ExitStack) -> list[socket.socket]:
    """A listener for each endpoint."""
    family = socket.AF_INET if plan.family is Family.IPV4 else socket.AF_INET6
    return [
        opened.enter_context(socket.create_server((format_address(each.address), each.port), family=family))
        for each in plan.endpoints
    ]


@pytest.mark.parametrize("of", Family)
def test_connections_are_spread_evenly_over_the_endpoints(node: Namespace, of: Family) -> None:
    """600 connections to three endpoints: a deviation of more than 80 from 200 is 7 standard deviations."""
    plan = port_plan(of, 0, endpoints=3)
    with node.entered(), contextlib.ExitStack() as opened:
        load_into_kernel(render([plan], NodePlan(), SETTINGS))
        listeners = listening(plan, opened)
        counts = collections.Counter(reached_endpoint(plan, listeners) for _ in range(600))
    assert counts.keys() == {0, 1, 2}
    assert all(120 < count < 280 for count in counts.values()), counts


def reached_endpoint(plan: ServicePortPlan, listeners: Sequence[socket.socket]) -> int:
    address, port, _ = plan.frontends[0].frontend
    with dial(format_address(address), port):
        (reached,), _, _ = select.select(listeners, [], [], 10)
        reached.accept()[0].close()
    return listeners.index(reached)


def test_an_unused_port_of_a_cluster_ip_is_rejected(served: ServicePortPlan) -> None:
    with pytest.raises(ConnectionRefusedError):
        dial("10.96.0.10", 999)


@pytest.mark.parametrize("of", Family)
def test_packets_to_addresses_of_a_service_cidr_that_no_service_has_are_dropped(
    node: Namespace, of: Family
) -> None:
    plan = port_plan(of, 0, endpoints=1)
    cidr, free, beside = {
        Family.IPV4: ("10.96.0.0/16", "10.96.3.3", "10.97.0.1"),
        Family.IPV6: ("fd00:96::/112", "fd00:96::303", "fd00:97::1"),
    }[of]
    with node.entered():
        for cidrs, dropped in (((), False), ((parse_network(cidr),), True)):
            nft("flush", "ruleset")
            load_into_kernel(render([plan], NodePlan(service_cidrs=frozenset(cidrs)), SETTINGS, [of]))
            assert is_dropped(free) is dropped
            assert not is_dropped(beside)
            with pytest.raises(ConnectionRefusedError):
                dial(format_address(plan.frontends[0].frontend.address), 999)


def is_dropped(address: str) -> bool:
    """Whether a rule of the hook output drops a packet to the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(b"x", (address, 9))
        except PermissionError:
            return True
    return False


def test_connections_to_a_service_without_endpoints_are_rejected(node: Namespace) -> None:
    plan = dataclasses.replace(
        port_plan(Family.IPV4, 0, endpoints=0), no_endpoint_action=NoEndpointAction.REJECT
    )
    with node.entered():
        load_into_kernel(render([plan], NodePlan(), SETTINGS))
        for address in ("10.96.0.10", "203.0.113.5"):
            with pytest.raises(ConnectionRefusedError):
                dial(address, 1000)


def test_packets_of_a_source_outside_the_source_ranges_are_dropped(node: Namespace) -> None:
    plan = port_plan(Family.IPV4, 0, ranges=(parse_network("198.51.100.0/24"),))
    with node.entered(), socket.create_server(("10.1.0.1", 8080)):
        load_into_kernel(render([plan], NodePlan(), SETTINGS))
        with pytest.raises(TimeoutError):
            socket.create_connection(("203.0.113.5", 1000), timeout=0.3)
        with dial("10.96.0.10", 1000):
            pass
