"""Plans become rules, one property at a time. Complete situations are in tests/golden/cases."""

import dataclasses

import pytest

from ebpfproxy.backends.iptables.service_rules import service_entries
from ebpfproxy.backends.xtables.entries import FILTER, NAT, Chain, Entry, Key, Rule, RulePosition
from ebpfproxy.model.address import Family, Protocol, parse_address, parse_network
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    LocalTraffic,
    NoEndpointAction,
    PlannedEndpoint,
    PolicyResult,
    Scope,
    ServicePortPlan,
)

NAME = ServicePortName("default", "web", "", Protocol.TCP)
HASH = "LOLE4ISW44XBNF3G"
SVC, SVL, EXT, FW = (f"KUBE-{kind}-{HASH}" for kind in ("SVC", "SVL", "EXT", "FW"))

PODS = LocalTraffic(parse_network("10.1.0.0/16"))
CLUSTER, LOCAL = PolicyResult(Scope.CLUSTER, False), PolicyResult(Scope.LOCAL, False)
MASQUERADED = PolicyResult(Scope.CLUSTER, True)


def frontend(kind: FrontendKind, address: str = "0.0.0.0", port: int = 80) -> FrontendPlan:
    """Return a frontend with policy Cluster."""
    pod = CLUSTER if kind is FrontendKind.CLUSTER_IP else MASQUERADED
    dialled = Frontend(parse_address(address), port, Protocol.TCP)
    return FrontendPlan(dialled, kind, pod, MASQUERADED, MASQUERADED)


DIALLED = "-d 10.96.0.10/32 -p tcp -m tcp --dport 80"

CLUSTER_IP = frontend(FrontendKind.CLUSTER_IP, "10.96.0.10")
NODE_PORT = frontend(FrontendKind.NODE_PORT, port=30080)
EXTERNAL_IP = frontend(FrontendKind.EXTERNAL_IP, "203.0.113.1")
BALANCER = frontend(FrontendKind.LOAD_BALANCER, "203.0.113.5")


def local(plan: FrontendPlan) -> FrontendPlan:
    """Return the plan of a frontend with externalTrafficPolicy Local."""
    return plan._replace(pod=CLUSTER, node=MASQUERADED, outside=LOCAL)


def endpoint(address: str, *, cluster: bool = True, local: bool = False, port: int = 8080) -> PlannedEndpoint:
    return PlannedEndpoint(parse_address(address), port, cluster, local, local)


def plan(
    *frontends: FrontendPlan, endpoints: tuple[PlannedEndpoint, ...] = (endpoint("10.1.0.1"),)
) -> ServicePortPlan:
    otherwise = NoEndpointAction.DROP if endpoints else NoEndpointAction.REJECT
    return ServicePortPlan(NAME, Family.IPV4, frontends, endpoints, otherwise, local_traffic=PODS)


def rendered(plan: ServicePortPlan) -> dict[Key, Entry]:
    return service_entries(plan)


def chain(entries: dict[Key, Entry], name: str) -> list[str]:
    """Return the rules of a chain of the Service, without comments; empty if there is no such chain."""
    rules = entries.get(Chain(Family.IPV4, NAT, name), ())
    assert isinstance(rules, tuple)
    return [uncommented(rule) for rule in rules]


def shared(entries: dict[Key, Entry], table: str, name: str) -> list[str]:
    rules = [key for key in entries if isinstance(key, Rule) and (key.table, key.chain) == (table, name)]
    assert all(entries[rule] is RulePosition.ANYWHERE and rule.family is Family.IPV4 for rule in rules)
    return [uncommented(rule.text) for rule in rules]


def uncommented(text: str) -> str:
    head, option, tail = text.partition('-m comment --comment "')
    return head + tail.partition('"')[2].lstrip() if option else text


def test_the_first_rule_masquerades_clients_that_are_not_pods() -> None:
    entries = rendered(plan(CLUSTER_IP))
    assert chain(entries, SVC)[0] == f"! -s 10.1.0.0/16 {DIALLED} -j KUBE-MARK-MASQ"


def test_if_all_sources_are_pods_no_cluster_ip_connection_is_masqueraded() -> None:
    everybody = dataclasses.replace(plan(CLUSTER_IP), local_traffic=LocalTraffic(parse_network("0.0.0.0/0")))
    assert not any("KUBE-MARK-MASQ" in rule for rule in chain(rendered(everybody), SVC))


def test_masquerade_all_also_masquerades_pods() -> None:
    entries = rendered(plan(CLUSTER_IP._replace(pod=MASQUERADED)))
    assert chain(entries, SVC)[0] == f"{DIALLED} -j KUBE-MARK-MASQ"


def test_without_masquerading_in_the_plan_there_is_no_masquerade_rule() -> None:
    entries = rendered(plan(CLUSTER_IP._replace(node=CLUSTER, outside=CLUSTER)))
    assert not any("KUBE-MARK-MASQ" in rule for rule in chain(entries, SVC))


def test_without_local_traffic_detection_the_cluster_ip_is_not_masqueraded() -> None:
    """Also if the policy results of pods differ: a pod keeps its address then."""
    undetected = dataclasses.replace(plan(CLUSTER_IP), local_traffic=None)
    assert not any("KUBE-MARK-MASQ" in rule for rule in chain(rendered(undetected), SVC))


def test_a_frontend_that_another_service_owns_has_no_rules() -> None:
    """A lost claim: neither jumps for the frontend nor chains without jumps."""
    endpoints = (endpoint("10.1.0.1", local=True), endpoint("10.1.0.2"))
    entries = rendered(plan(CLUSTER_IP, endpoints=endpoints))
    assert not chain(entries, SVL)
    assert not chain(entries, EXT)
    entries = rendered(plan(local(EXTERNAL_IP), endpoints=endpoints))
    assert all("KUBE-MARK-MASQ" not in rule for rule in chain(entries, SVC))
    assert len(chain(entries, SVL)) == 1


def test_a_service_without_frontends_has_no_rules() -> None:
    assert rendered(plan()) == {}


def test_without_endpoints_all_frontends_are_rejected_and_none_translated() -> None:
    entries = rendered(
        plan(CLUSTER_IP, EXTERNAL_IP, BALANCER._replace(restricted=True), NODE_PORT, endpoints=())
    )
    rejected = "-j REJECT --reject-with icmp-port-unreachable"
    assert shared(entries, FILTER, "KUBE-SERVICES") == [f"{DIALLED} {rejected}"]
    assert shared(entries, FILTER, "KUBE-EXTERNAL-SERVICES") == [
        f"-d 203.0.113.1/32 -p tcp -m tcp --dport 80 {rejected}",
        f"-d 203.0.113.5/32 -p tcp -m tcp --dport 80 {rejected}",
        f"-p tcp -m addrtype --dst-type LOCAL -m tcp --dport 30080 {rejected}",
    ]
    assert len(entries) == 4


def test_ipv6_rejects_with_its_own_icmp_message() -> None:
    dialled = Frontend(parse_address("fd96::10"), 80, Protocol.TCP)
    of_six = dataclasses.replace(
        plan(CLUSTER_IP._replace(frontend=dialled), endpoints=()), family=Family.IPV6
    )
    (rule,) = rendered(of_six)
    assert isinstance(rule, Rule)
    assert rule.text.startswith("-d fd96::10/128 -p tcp ")
    assert rule.text.endswith(" -j REJECT --reject-with icmp6-port-unreachable")


def test_policy_local_without_a_local_endpoint_drops_external_clients() -> None:
    entries = rendered(plan(CLUSTER_IP, local(NODE_PORT)))
    assert shared(entries, FILTER, "KUBE-EXTERNAL-SERVICES") == [
        "-p tcp -m addrtype --dst-type LOCAL -m tcp --dport 30080 -j DROP"
    ]
    assert shared(entries, NAT, "KUBE-NODEPORTS") == [f"-p tcp -m tcp --dport 30080 -j {EXT}"]
    assert chain(entries, EXT) == [
        f"-s 10.1.0.0/16 -j {SVC}",
        "-m addrtype --src-type LOCAL -j KUBE-MARK-MASQ",
        f"-m addrtype --src-type LOCAL -j {SVC}",
    ]


def test_policy_local_sends_external_clients_to_local_endpoints() -> None:
    endpoints = (endpoint("10.1.0.1", local=True), endpoint("10.1.0.2"))
    entries = rendered(plan(CLUSTER_IP, local(NODE_PORT), endpoints=endpoints))
    assert chain(entries, EXT)[-1] == f"-j {SVL}"
    assert len(chain(entries, SVL)) == 1
    assert not shared(entries, FILTER, "KUBE-EXTERNAL-SERVICES")


def test_without_local_traffic_detection_policy_local_also_applies_to_pods() -> None:
    undetected = plan(local(NODE_PORT)._replace(pod=LOCAL))
    entries = rendered(dataclasses.replace(undetected, local_traffic=None))
    assert chain(entries, EXT) == [
        "-m addrtype --src-type LOCAL -j KUBE-MARK-MASQ",
        f"-m addrtype --src-type LOCAL -j {SVC}",
    ]


def test_every_jump_has_an_existing_target() -> None:
    """All endpoints are on this node, and none is for policy Cluster. The tool would reject everything for
    one such jump.
    """
    entries = rendered(plan(local(NODE_PORT), endpoints=(endpoint("10.1.0.1", cluster=False, local=True),)))
    assert not any(SVC in rule for rule in chain(entries, EXT))
    assert chain(entries, EXT)[-1] == f"-j {SVL}"


def test_source_ranges_are_checked_first_and_other_sources_are_dropped() -> None:
    ranges = (parse_network("198.51.100.0/24"), parse_network("192.0.2.0/24"))
    restricted = BALANCER._replace(restricted=True, source_ranges=ranges)
    second = restricted._replace(frontend=restricted.frontend._replace(address=parse_address("203.0.113.6")))
    entries = rendered(plan(CLUSTER_IP, restricted, second))
    assert chain(entries, FW) == [
        f"-s 198.51.100.0/24 -j {EXT}",
        f"-s 192.0.2.0/24 -j {EXT}",
        f"-s 203.0.113.5/32 -j {EXT}",
        f"-s 203.0.113.6/32 -j {EXT}",
        "",
    ]
    assert shared(entries, NAT, "KUBE-SERVICES")[1:] == [
        f"-d 203.0.113.{last}/32 -p tcp -m tcp --dport 80 -j {FW}" for last in (5, 6)
    ]
    assert shared(entries, FILTER, "KUBE-PROXY-FIREWALL") == [
        f"-d 203.0.113.{last}/32 -p tcp -m tcp --dport 80 -j DROP" for last in (5, 6)
    ]


def test_a_node_outside_all_source_ranges_is_not_allowed() -> None:
    restricted = BALANCER._replace(
        restricted=True, source_ranges=(parse_network("198.51.100.0/24"),), node_admitted=False
    )
    assert chain(rendered(plan(restricted)), FW) == [f"-s 198.51.100.0/24 -j {EXT}", ""]


def test_source_ranges_apply_only_to_the_load_balancer() -> None:
    restricted = BALANCER._replace(restricted=True, source_ranges=(parse_network("198.51.100.0/24"),))
    entries = rendered(plan(EXTERNAL_IP, restricted, NODE_PORT))
    assert shared(entries, NAT, "KUBE-SERVICES")[0].endswith(f"-j {EXT}")
    assert shared(entries, NAT, "KUBE-NODEPORTS") == [f"-p tcp -m tcp --dport 30080 -j {EXT}"]


def test_a_hairpin_connection_is_masqueraded() -> None:
    entries = rendered(plan(CLUSTER_IP))
    assert chain(entries, "KUBE-SEP-LAE4CYYNBDVVQRFA") == [
        "-s 10.1.0.1/32 -j KUBE-MARK-MASQ",
        "-p tcp -m tcp -j DNAT --to-destination 10.1.0.1:8080",
    ]


def test_endpoints_have_the_order_of_kube_proxy() -> None:
    """kube-proxy sorts endpoints as text. In another order, a takeover would rewrite every rule."""
    endpoints = tuple(endpoint(f"10.1.0.{last}") for last in (2, 10, 100))
    entries = rendered(plan(CLUSTER_IP, endpoints=endpoints))
    notes = entries[Chain(Family.IPV4, NAT, SVC)]
    assert isinstance(notes, tuple)
    order = [rule.split('"')[1].partition(" -> ")[2] for rule in notes[1:]]
    assert order == ["10.1.0.100:8080", "10.1.0.10:8080", "10.1.0.2:8080"]


def test_with_affinity_a_known_client_gets_its_previous_endpoint() -> None:
    endpoints = (endpoint("10.1.0.1"), endpoint("10.1.0.2"))
    sticky = dataclasses.replace(plan(CLUSTER_IP, endpoints=endpoints), affinity_timeout=600)
    first, second = "KUBE-SEP-LAE4CYYNBDVVQRFA", "KUBE-SEP-QLJKHGVHULZQMSXA"
    client = "--mask 255.255.255.255 --rsource"
    entries = rendered(sticky)
    assert chain(entries, SVC)[1:] == [
        f"-m recent --rcheck --seconds 600 --reap --name {first} {client} -j {first}",
        f"-m recent --rcheck --seconds 600 --reap --name {second} {client} -j {second}",
        f"-m statistic --mode random --probability 0.50000000000 -j {first}",
        f"-j {second}",
    ]
    set_ = f"-p tcp -m recent --set --name {first} {client} -m tcp -j DNAT --to-destination 10.1.0.1:8080"
    assert chain(entries, first)[1] == set_


def test_the_health_check_node_port_is_accepted() -> None:
    asked = dataclasses.replace(plan(CLUSTER_IP, endpoints=()), health_check_node_port=32000)
    assert shared(rendered(asked), FILTER, "KUBE-NODEPORTS") == ["-p tcp -m tcp --dport 32000 -j ACCEPT"]


@pytest.mark.parametrize(("protocol", "name"), [(Protocol.UDP, "udp"), (Protocol.SCTP, "sctp")])
def test_the_protocol_is_matched(protocol: Protocol, name: str) -> None:
    entries = rendered(dataclasses.replace(plan(CLUSTER_IP), name=NAME._replace(protocol=protocol)))
    (captured,) = shared(entries, NAT, "KUBE-SERVICES")
    assert captured.startswith(f"-d 10.96.0.10/32 -p {name} -m {name} --dport 80 -j KUBE-SVC-")
    (_, translated) = chain(entries, captured.rpartition(" ")[2])
    (translating,) = [key.name for key in entries if isinstance(key, Chain) and "SEP" in key.name]
    assert translated == f"-j {translating}"
    assert chain(entries, translating)[1] == f"-p {name} -m {name} -j DNAT --to-destination 10.1.0.1:8080"


def test_in_a_large_cluster_comments_of_endpoints_are_left_out_and_the_others_stay() -> None:
    entries = rendered(dataclasses.replace(plan(CLUSTER_IP, NODE_PORT), terse=True))
    texts = {key.name: entry for key, entry in entries.items() if isinstance(key, Chain)}
    assert texts["KUBE-SEP-LAE4CYYNBDVVQRFA"] == (
        "-s 10.1.0.1/32 -j KUBE-MARK-MASQ",
        "-p tcp -m tcp -j DNAT --to-destination 10.1.0.1:8080",
    )
    assert texts[SVC] == (
        f"! -s 10.1.0.0/16 {DIALLED} -j KUBE-MARK-MASQ".replace(
            "-p tcp", '-p tcp -m comment --comment "default/web cluster IP"'
        ),
        "-j KUBE-SEP-LAE4CYYNBDVVQRFA",
    )
    assert texts[EXT] == (
        '-m comment --comment "masquerade traffic for default/web external destinations" -j KUBE-MARK-MASQ',
        f"-j {SVC}",
    )
