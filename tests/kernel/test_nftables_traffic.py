"""Connections through the nftables backend, and how its removal affects them."""

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.nftables import cleanup, table
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE, nft_family
from ebpfproxy.backends.nftables.names import endpoint_name, port_name
from ebpfproxy.backends.nftables.node_objects import NAT_CHAINS
from ebpfproxy.lab import Lab, Pod
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.nft.messages import Operation
from ebpfproxy.linux.nft.nft import Rejection, Session
from ebpfproxy.model.address import (
    Family,
    Protocol,
    format_address,
    format_endpoint,
    parse_address,
    unspecified,
)
from ebpfproxy.model.service import ServicePortName
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
from tests.kernel.clients import SILENT, TCP, UDP, connected, converse, outcome
from tests.kernel.cluster import SERVICE_NETWORKS

pytestmark = pytest.mark.kernel

VIP = {Family.IPV4: "10.96.0.1", Family.IPV6: "fd00:10:96::1"}
IPS = ("ip", "ip6")
PORT, TARGET, REPORTING, NODE_PORT = 80, 8080, 8081, 30080
KEPT, MASQUERADED = PolicyResult(Scope.CLUSTER, False), PolicyResult(Scope.CLUSTER, True)


class Testbed:
    """A node with a server in the pod a and a client in the pod p. Both pods report the client's address on
    port REPORTING."""

    __test__ = False  # pytest collects classes by their names

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.a, self.p = lab.pod("a"), lab.pod("p")
        self.a.serve(Protocol.TCP, TARGET)
        for pod in (self.a, self.p):
            for protocol in (TCP, UDP):
                pod.serve_echo(protocol, REPORTING)
        lab.ip(lab.outside, *(f"route add blackhole {network}" for network in SERVICE_NETWORKS))

    def on_node(self) -> contextlib.AbstractContextManager[None]:
        """Within the block the calling thread is in the node's network namespace."""
        return netns.entered(self.lab.node.netns)

    def address(self, pod: Pod, of: Family) -> str:
        return pod.v4 if of is Family.IPV4 else pod.v6

    def plans(
        self,
        *endpoints: Pod,
        protocol: Protocol = TCP,
        target: int = TARGET,
        affinity: int = 0,
        on_node: bool = True,
    ) -> list[ServicePortPlan]:
        """One Service, with a ClusterIP and a NodePort in both families."""
        return [self._plan(of, endpoints, protocol, target, affinity, on_node) for of in Family]

    def _plan(
        self,
        of: Family,
        endpoints: tuple[Pod, ...],
        protocol: Protocol,
        target: int,
        affinity: int,
        on_node: bool,
    ) -> ServicePortPlan:
        cluster_ip = Frontend(parse_address(VIP[of]), PORT, protocol)
        node_port = Frontend(unspecified(of), NODE_PORT, protocol)
        addresses = [parse_address(self.address(pod, of)) for pod in endpoints]
        return ServicePortPlan(
            ServicePortName("default", "web", "", protocol),
            of,
            (
                FrontendPlan(cluster_ip, FrontendKind.CLUSTER_IP, KEPT, KEPT, KEPT),
                FrontendPlan(node_port, FrontendKind.NODE_PORT, MASQUERADED, MASQUERADED, MASQUERADED),
            ),
            PlannedEndpoints(
                PlannedEndpoint(each, target, True, True, on_node) for each in sorted(addresses)
            ),
            NoEndpointAction.REJECT,
            affinity,
        )

    def serve(self, *endpoints: Pod, **options: Any) -> None:
        """Program the Service; `options` as of `plans`."""
        with self.on_node(), contextlib.closing(NftablesBackend()) as plane:
            plane.open()
            wanted = plane.render(self.plans(*endpoints, **options), NodePlan())
            assert not plane.apply(diff(plane.read(), wanted))
            assert plane.read() == wanted

    def nft(self, commands: str, *options: str) -> str:
        with self.on_node():
            done = subprocess.run(
                ["nft", *options, "-f", "-"],
                input=commands,
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
        return done.stdout

    def reset(self) -> None:
        """Remove all rules and all conntrack entries."""
        self.nft("flush ruleset")
        with self.on_node():
            for protocol in (TCP, UDP):
                for flow in conntrack.flows(protocol):
                    conntrack.delete(flow)


@pytest.fixture(scope="module")
def _testbed() -> Iterator[Testbed]:
    with Lab("test-nftables", 34) as lab:
        yield Testbed(lab)


@pytest.fixture
def testbed(_testbed: Testbed) -> Iterator[Testbed]:
    yield _testbed
    _testbed.reset()


@pytest.fixture(params=list(Family), ids=lambda of: of.value)
def of(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


@pytest.mark.parametrize("is_first", [True, False], ids=["plugin first", "plugin later"])
def test_nat_rules_of_a_network_plugin_do_not_see_connections_to_services(
    testbed: Testbed, of: Family, is_first: bool
) -> None:
    """The Amazon VPC CNI marks what pods send to addresses outside its network, also to ClusterIPs, and
    routes by the mark (aws/amazon-vpc-cni-k8s#3563). Its rules are in the table nat of iptables-nft, at the
    priority of kube-proxy's chains. Of two such chains the newer one runs first."""
    if is_first:
        with marks_of_plugin(testbed, of):
            testbed.serve(testbed.a)
            assert outcome(testbed.p, TCP, VIP[of], PORT) == "a"
    else:
        testbed.serve(testbed.a)
        with marks_of_plugin(testbed, of):
            assert outcome(testbed.p, TCP, VIP[of], PORT) == "a"


@contextlib.contextmanager
def marks_of_plugin(testbed: Testbed, of: Family) -> Iterator[None]:
    """Sources: pkg/networkutils/network.go of amazon-vpc-cni-k8s 1.22. The main interface is a blackhole."""
    tool, version = ("iptables-nft", "-4") if of is Family.IPV4 else ("ip6tables-nft", "-6")
    pods = getattr(testbed.lab.addresses.pods(0), "v4" if of is Family.IPV4 else "v6")
    prerouting, run = [tool, "-w", "-t", "nat", "-A", "PREROUTING"], testbed.lab.node.run
    run([*prerouting, *["-i", "veth+", "!", "-d"], pods, *["-j", "CONNMARK", "--set-xmark", "0x80/0x80"]])
    run([*prerouting, *["-j", "CONNMARK", "--restore-mark", "--nfmask", "0x80", "--ctmask", "0x80"]])
    rule = ["fwmark", "0x80/0x80", "lookup", "101", "priority", "1024"]
    run(["ip", version, *["route", "add", "blackhole", "default", "table", "101"]])
    run(["ip", version, "rule", "add", *rule])
    try:
        yield
    finally:
        run(["ip", version, "rule", "del", *rule])
        run(["ip", version, *["route", "flush", "table", "101"]])


@pytest.mark.parametrize("on_node", [True, False], ids=["here", "elsewhere"])
@pytest.mark.parametrize("affinity", [0, 600], ids=["by chance", "remembered"])
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=lambda protocol: protocol.name)
def test_an_endpoint_reaches_itself_through_its_service(
    testbed: Testbed, of: Family, protocol: Protocol, affinity: int, on_node: bool
) -> None:
    """Also if its slice names another node."""
    testbed.serve(testbed.a, protocol=protocol, target=REPORTING, affinity=affinity, on_node=on_node)
    name, _, client = outcome(testbed.a, protocol, VIP[of], PORT).partition(" ")
    assert name == "a"
    assert client != testbed.address(testbed.a, of), "without a masquerade the reply would not pass the node"


@pytest.mark.parametrize("protocol", [TCP, UDP], ids=lambda protocol: protocol.name)
def test_an_endpoint_is_masqueraded_only_toward_itself(
    testbed: Testbed, of: Family, protocol: Protocol
) -> None:
    testbed.serve(testbed.a, testbed.p, protocol=protocol, target=REPORTING)
    answers = {outcome(testbed.p, protocol, VIP[of], PORT) for _ in range(40)}
    own = testbed.address(testbed.p, of)
    assert f"a {own}" in answers
    (other,) = answers - {f"a {own}"}
    assert other.startswith("p ")
    assert other != f"p {own}"


@pytest.mark.parametrize("part", [1000, 0], ids=["at once", "by parts"])
def test_an_older_table_layout_is_replaced_without_an_interruption(
    testbed: Testbed, of: Family, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """The older layout has a chain for each endpoint, as in older versions of kube-proxy and of ebpfproxy.
    New connections work after each transaction, also one of the endpoint to itself."""
    monkeypatch.setattr(table, "_LARGE", part)
    monkeypatch.setattr(table, "_SETS_IN_A_PART", part)
    commit, commits = Session.commit, 0

    def committed(session: Session, operations: Sequence[Operation]) -> list[Rejection]:
        nonlocal commits
        rejections = commit(session, operations)
        commits += 1
        assert [outcome(pod, TCP, VIP[of], PORT) for pod in (testbed.a, testbed.p)] == ["a", "a"]
        return rejections

    testbed.nft(previous(testbed, of))
    with conversing(testbed, of) as clients:
        monkeypatch.setattr(Session, "commit", committed)
        testbed.serve(testbed.a)
        assert commits >= (len(Family) if part else 10)
        assert [converse(client) for client in clients] == ["a"] * len(clients)
    assert "goto endpoint-" not in testbed.nft("list ruleset")


def previous(testbed: Testbed, of: Family) -> str:
    """The same Service, of one family, with a chain for its endpoint."""
    name, address = ServicePortName("default", "web", "", TCP), parse_address(testbed.address(testbed.a, of))
    ip, addresses = nft_family(of), "ipv4_addr" if of is Family.IPV4 else "ipv6_addr"
    endpoint = f"endpoint-{endpoint_name(name, address, TARGET)}"
    service, external = f"service-{port_name(name)}", f"external-{port_name(name)}"
    return f"""
        table {ip} {TABLE} {{
            chain mark-for-masquerade {{ meta mark set meta mark | 0x4000; }}
            chain masquerading {{
                meta mark & 0x4000 == 0 return
                meta mark set meta mark ^ 0x4000
                masquerade fully-random
            }}
            chain {endpoint} {{
                {ip} saddr {format_address(address)} jump mark-for-masquerade
                meta l4proto tcp dnat to {format_endpoint(address, TARGET)}
            }}
            chain {service} {{ numgen random mod 1 vmap {{ 0 : goto {endpoint} }}; }}
            chain {external} {{
                jump mark-for-masquerade
                goto {service}
            }}
            map service-ips {{
                type {addresses} . inet_proto . inet_service : verdict
                elements = {{ {VIP[of]} . tcp . {PORT} : goto {service} }}
            }}
            map service-nodeports {{
                type inet_proto . inet_service : verdict
                elements = {{ tcp . {NODE_PORT} : goto {external} }}
            }}
            chain services {{
                {ip} daddr . meta l4proto . th dport vmap @service-ips
                fib daddr type local meta l4proto . th dport vmap @service-nodeports
            }}
            chain nat-prerouting {{ type nat hook prerouting priority -100; jump services; }}
            chain nat-output {{ type nat hook output priority -100; jump services; }}
            chain nat-postrouting {{ type nat hook postrouting priority 100; jump masquerading; }}
        }}
        """


@contextlib.contextmanager
def conversing(testbed: Testbed, of: Family) -> Iterator[list[socket.socket]]:
    """Three open connections through the Service: of a pod, of the node itself, and of an external client
    through the NodePort, which is masqueraded."""
    node = testbed.address(testbed.lab.node, of)
    dials = (
        (testbed.p, VIP[of], PORT),
        (testbed.lab.node, VIP[of], PORT),
        (testbed.lab.outside, node, NODE_PORT),
    )
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connected(source, TCP, to, port)) for source, to, port in dials]
        assert [converse(client) for client in clients] == ["a"] * 3
        yield clients


def test_open_connections_survive_the_drain_of_the_mode(testbed: Testbed, of: Family) -> None:
    testbed.serve(testbed.a)
    with conversing(testbed, of) as clients:
        with testbed.on_node():
            removed, left = cleanup.drain(conntrack.nat_in_use)
        assert (len(removed), left) == (2, True)
        assert [converse(client) for client in clients] == ["a"] * 3
        assert outcome(testbed.p, TCP, VIP[of], PORT, 0.5) == SILENT, "new connections are not translated"
        with testbed.on_node():
            assert cleanup.drain(conntrack.nat_in_use) == ([], True), (
                "the tables stay while connections are open"
            )
        assert [converse(client) for client in clients] == ["a"] * 3


def test_the_drained_tables_are_removed_once_no_connection_is_translated(testbed: Testbed) -> None:
    translated = True
    testbed.serve(testbed.a)
    with testbed.on_node():
        assert cleanup.drain(lambda of: translated)[1] is True
        assert "nat" in testbed.nft("list ruleset")
        translated = False
        removed, left = cleanup.drain(lambda of: translated)
    assert (len(removed), left) == (2, False)
    assert testbed.nft("list ruleset") == ""
    with testbed.on_node():
        assert cleanup.drain(conntrack.nat_in_use) == ([], False)


def test_the_drain_of_a_family_waits_only_for_connections_of_that_family(testbed: Testbed) -> None:
    testbed.serve(testbed.a)
    with testbed.on_node():
        assert cleanup.drain(lambda of: of is Family.IPV6)[1] is True
    assert f"table ip {TABLE}" not in testbed.nft("list ruleset")
    assert f"table ip6 {TABLE}" in testbed.nft("list ruleset")


def test_the_mode_can_start_again_while_it_is_drained(testbed: Testbed, of: Family) -> None:
    testbed.serve(testbed.a)
    with conversing(testbed, of) as clients:
        with testbed.on_node():
            cleanup.drain(conntrack.nat_in_use)
        testbed.serve(testbed.a)
        assert [converse(client) for client in clients] == ["a"] * 3
        assert outcome(testbed.p, TCP, VIP[of], PORT) == "a"


def test_removal_deletes_only_the_tables_of_this_mode(testbed: Testbed) -> None:
    testbed.nft("table ip foreign { chain one { }; }; table inet kube-proxy { chain two { }; }")
    others = testbed.nft("list ruleset")
    testbed.serve(testbed.a)
    complete = testbed.nft("list ruleset")
    with testbed.on_node():
        reported = cleanup.remove(dry_run=True)
        assert testbed.nft("list ruleset") == complete
        assert cleanup.remove() == reported
        assert cleanup.remove() == []
    assert [line.partition(":")[0] for line in reported] == [
        f"nftables table {ip} {TABLE}" for ip in ("ip", "ip6")
    ]
    assert testbed.nft("list ruleset") == others


def test_the_table_of_kube_proxy_is_removed_regardless_of_its_content(testbed: Testbed) -> None:
    testbed.nft(
        f"""
        table ip {TABLE} {{
            counter seen {{ }}
            map numbers {{ type ipv4_addr : mark; }}
            chain somewhere {{ counter drop; }}
            chain here {{ type filter hook input priority 5; policy drop; jump somewhere; }}
        }}
        """
    )
    with testbed.on_node():
        assert cleanup.drain(lambda of: True) == (
            [f"nftables table ip {TABLE}: 1 sets and maps, 2 chains, 1 of them base chains"],
            False,
        )
    assert testbed.nft("list ruleset") == ""


def test_after_a_roll_back_nothing_is_left_that_kube_proxy_does_not_use(testbed: Testbed, of: Family) -> None:
    """kube-proxy kept our maps, sets and one chain in its table for ever."""
    testbed.serve(testbed.a, affinity=600)
    with testbed.on_node():
        assert cleanup.remove_beside_kube_proxy() == [], "everything is in use"
    assert outcome(testbed.p, TCP, VIP[of], PORT) == "a"
    for ip in ("ip", "ip6"):
        take_over_as_kube_proxy(testbed, ip)
    kept = {ip: object_names(testbed, ip) for ip in ("ip", "ip6")}
    with testbed.on_node():
        reported = cleanup.remove_beside_kube_proxy(dry_run=True)
        assert {ip: object_names(testbed, ip) for ip in kept} == kept
        assert cleanup.remove_beside_kube_proxy() == reported
        assert cleanup.remove_beside_kube_proxy() == []
    for ip, names in kept.items():
        own = {"affinity", "equal-bytes", "mark-for-masquerade", *NAT_CHAINS}
        own |= {name for name in names if name.startswith("endpoints-")}
        assert len(own) > 3
        assert object_names(testbed, ip) == names - own
        assert "hairpin-connections" in names
    assert len(reported) == len(set(reported))


def take_over_as_kube_proxy(testbed: Testbed, ip: str) -> None:
    """Do to a table what the first sync of kube-proxy 1.36 does (syncProxyRules in
    pkg/proxy/nftables/proxier.go): it flushes all chains and the elements of its maps, deletes chains of
    Services, and writes its own objects."""
    names = object_names(testbed, ip)
    maps = [f"flush map {ip} {TABLE} {name}" for name in sorted(names & KUBE_PROXY_MAPS)]
    testbed.nft(
        "\n".join(
            [
                *(f"flush chain {ip} {TABLE} {name}" for name in chain_names(testbed, ip)),
                *maps,
                f"add chain {ip} {TABLE} nat-prerouting {{ type nat hook prerouting priority dstnat; }}",
                f"add chain {ip} {TABLE} nat-output {{ type nat hook output priority -100; }}",
                f"add chain {ip} {TABLE} nat-postrouting {{ type nat hook postrouting priority srcnat; }}",
                f"add set {ip} {TABLE} hairpin-connections "
                f"{{ type {ip}v4_addr . {ip}v4_addr . inet_proto . inet_service; }}".replace("ip6v4", "ipv6"),
            ]
        )
    )
    testbed.nft(
        "\n".join(f"delete chain {ip} {TABLE} {name}" for name in chain_names(testbed, ip) if "/" in name)
    )


KUBE_PROXY_MAPS = {
    *("service-ips", "service-nodeports", "firewall-ips", "no-endpoint-services", "no-endpoint-nodeports")
}


def chain_names(testbed: Testbed, ip: str) -> list[str]:
    return [each["chain"]["name"] for each in listed(testbed, ip) if "chain" in each]


def object_names(testbed: Testbed, ip: str) -> set[str]:
    """The names of chains, sets and maps."""
    kinds = "chain", "set", "map"
    return {each[kind]["name"] for each in listed(testbed, ip) for kind in kinds if kind in each}


def listed(testbed: Testbed, ip: str) -> list[dict[str, Any]]:
    with testbed.on_node():
        command = ["nft", "-j", "list", "table", ip, TABLE]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    objects: list[dict[str, Any]] = json.loads(done.stdout)["nftables"]
    return objects
