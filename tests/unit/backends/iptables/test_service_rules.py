"""Plans become rules: one property at a time. tests/golden has complete cases."""

import dataclasses

import pytest

from ebpfproxy.backends.iptables.entries import FILTER, NAT, Chain, Entry, Key, Rule, RulePosition
from ebpfproxy.backends.iptables.service_rules import service_entries
from ebpfproxy.model.address import Family, Protocol, parse_address, parse_network
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    LocalTraffic,
    NoEndpointAction,
    PlannedEndpoint,
    PlannedEndpoints,
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
    """A ClusterIP as policy Cluster treats it; anything else likewise."""
    pod = CLUSTER if kind is FrontendKind.CLUSTER_IP else MASQUERADED
    dialled = Frontend(parse_address(address), port, Protocol.TCP)
    return FrontendPlan(dialled, kind, pod, MASQUERADED, MASQUERADED)


DIALLED = "-d 10.96.0.10/32 -p tcp -m tcp --dport 80"

CLUSTER_IP = frontend(FrontendKind.CLUSTER_IP, "10.96.0.10")
NODE_PORT = frontend(FrontendKind.NODE_PORT, port=30080)
EXTERNAL_IP = frontend(FrontendKind.EXTERNAL_IP, "203.0.113.1")
BALANCER = frontend(FrontendKind.LOAD_BALANCER, "203.0.113.5")


def local(plan: FrontendPlan) -> FrontendPlan:
    """As externalTrafficPolicy Local treats it."""
    return plan._replace(pod=CLUSTER, node=MASQUERADED, outside=LOCAL)


def endpoint(address: str, *, cluster: bool = True, local: bool = False, port: int = 8080) -> PlannedEndpoint:
    return PlannedEndpoint(parse_address(address), port, cluster, local, local)


def plan(
    *frontends: FrontendPlan, endpoints: tuple[PlannedEndpoint, ...] = (endpoint("10.1.0.1"),)
) -> ServicePortPlan:
    otherwise = NoEndpointAction.DROP if endpoints else NoEndpointAction.REJECT
    return ServicePortPlan(
        NAME, Family.IPV4, frontends, PlannedEndpoints(endpoints), otherwise, local_traffic=PODS
    )


def rendered(plan: ServicePortPlan) -> dict[Key, Entry]:
    return service_entries(plan)


def chain(entries: dict[Key, Entry], name: str) -> list[str]:
    """The rules of a chain of the Service's own, without comments; none where there is no such chain."""
    rules = entries.get(Chain(Family.IPV4, NAT, name), ())
    assert isinstance(rules, tuple)
    return [uncommented(rule) for rule in rules]


def shared(entries: dict[Key, Entry], table: str, name: str) -> list[str]:
    rules = [key for key in entries if isinstance(key, Rule) and (key.table, key.chain) == (table, name)]
    position = RulePosition.LAST if (table, name) == (NAT, "KUBE-NODEPORTS") else RulePosition.ANYWHERE
    assert all(entries[rule] is position and rule.family is Family.IPV4 for rule in rules)
    return [uncommented(rule.text) for rule in rules]


def uncommented(text: str) -> str:
    head, option, tail = text.partition('-m comment --comment "')
    return head + tail.partition('"')[2].lstrip() if option else text


def test_who_is_no_pod_is_masqueraded_first_of_all() -> None:
    entries = rendered(plan(CLUSTER_IP))
    assert chain(entries, SVC)[0] == f"! -s 10.1.0.0/16 {DIALLED} -j KUBE-MARK-MASQ"


def test_where_everybody_is_a_pod_nobody_is_masqueraded_at_the_cluster_ip() -> None:
    everybody = dataclasses.replace(plan(CLUSTER_IP), local_traffic=LocalTraffic(parse_network("0.0.0.0/0")))
    assert not any("KUBE-MARK-MASQ" in rule for rule in chain(rendered(everybody), SVC))


def test_masquerading_all_tells_nobody_from_a_pod() -> None:
    entries = rendered(plan(CLUSTER_IP._replace(pod=MASQUERADED)))
    assert chain(entries, SVC)[0] == f"{DIALLED} -j KUBE-MARK-MASQ"


def test_a_cluster_ip_whose_plan_masquerades_nobody_does_not() -> None:
    entries = rendered(plan(CLUSTER_IP._replace(node=CLUSTER, outside=CLUSTER)))
    assert not any("KUBE-MARK-MASQ" in rule for rule in chain(entries, SVC))


def test_without_anything_that_tells_pods_the_cluster_ip_masquerades_nobody() -> None:
    """Even where the plan has policy_results that cannot be told apart: a pod keeps its address then."""
    untold = dataclasses.replace(plan(CLUSTER_IP), local_traffic=None)
    assert not any("KUBE-MARK-MASQ" in rule for rule in chain(rendered(untold), SVC))


def test_a_frontend_that_another_service_has_is_nowhere_in_the_rules() -> None:
    """Lost claims: neither what leads there nor chains that nothing leads to."""
    endpoints = (endpoint("10.1.0.1", local=True), endpoint("10.1.0.2"))
    entries = rendered(plan(CLUSTER_IP, endpoints=endpoints))
    assert not chain(entries, SVL)
    assert not chain(entries, EXT)
    entries = rendered(plan(local(EXTERNAL_IP), endpoints=endpoints))
    assert all("KUBE-MARK-MASQ" not in rule for rule in chain(entries, SVC))
    assert len(chain(entries, SVL)) == 1


def test_a_service_without_frontends_has_no_rules() -> None:
    assert rendered(plan()) == {}


def test_without_any_endpoint_everything_is_refused_and_nothing_translated() -> None:
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


def test_ipv6_refuses_with_its_own_message() -> None:
    dialled = Frontend(parse_address("fd96::10"), 80, Protocol.TCP)
    of_six = dataclasses.replace(
        plan(CLUSTER_IP._replace(frontend=dialled), endpoints=()), family=Family.IPV6
    )
    (rule,) = rendered(of_six)
    assert isinstance(rule, Rule)
    assert rule.text.startswith("-d fd96::10/128 -p tcp ")
    assert rule.text.endswith(" -j REJECT --reject-with icmp6-port-unreachable")


def test_policy_local_without_an_endpoint_here_drops_what_was_not_let_through_before() -> None:
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


def test_policy_local_leads_outside_to_the_endpoints_here() -> None:
    endpoints = (endpoint("10.1.0.1", local=True), endpoint("10.1.0.2"))
    entries = rendered(plan(CLUSTER_IP, local(NODE_PORT), endpoints=endpoints))
    assert chain(entries, EXT)[-1] == f"-j {SVL}"
    assert len(chain(entries, SVL)) == 1
    assert not shared(entries, FILTER, "KUBE-EXTERNAL-SERVICES")


def test_without_anything_that_tells_pods_policy_local_lets_none_through() -> None:
    nobody = plan(local(NODE_PORT)._replace(pod=LOCAL))
    entries = rendered(dataclasses.replace(nobody, local_traffic=None))
    assert chain(entries, EXT) == [
        "-m addrtype --src-type LOCAL -j KUBE-MARK-MASQ",
        f"-m addrtype --src-type LOCAL -j {SVC}",
    ]


def test_a_jump_never_leads_to_a_chain_that_is_not_there() -> None:
    """Only endpoints here, none for policy Cluster: the tool would reject everything for one such jump."""
    entries = rendered(plan(local(NODE_PORT), endpoints=(endpoint("10.1.0.1", cluster=False, local=True),)))
    assert not any(SVC in rule for rule in chain(entries, EXT))
    assert chain(entries, EXT)[-1] == f"-j {SVL}"


def test_source_ranges_are_checked_before_anything_else_and_the_rest_is_dropped() -> None:
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


def test_a_node_that_no_range_holds_is_not_let_in() -> None:
    restricted = BALANCER._replace(
        restricted=True, source_ranges=(parse_network("198.51.100.0/24"),), node_admitted=False
    )
    assert chain(rendered(plan(restricted)), FW) == [f"-s 198.51.100.0/24 -j {EXT}", ""]


def test_source_ranges_are_about_the_load_balancer_alone() -> None:
    restricted = BALANCER._replace(restricted=True, source_ranges=(parse_network("198.51.100.0/24"),))
    entries = rendered(plan(EXTERNAL_IP, restricted, NODE_PORT))
    assert shared(entries, NAT, "KUBE-SERVICES")[0].endswith(f"-j {EXT}")
    assert shared(entries, NAT, "KUBE-NODEPORTS") == [f"-p tcp -m tcp --dport 30080 -j {EXT}"]


def test_connections_to_a_node_port_on_localhost_are_counted_before_the_usual_rule_matches() -> None:
    usual, counted = service_entries(plan(NODE_PORT)), service_entries(plan(NODE_PORT), counts_localhost=True)
    text = (
        '-d 127.0.0.0/8 -p tcp -m comment --comment "default/web" -m tcp --dport 30080'
        f" -m nfacct --nfacct-name localhost_nps_accepted_pkts -j {EXT}"
    )
    rule = Rule(Family.IPV4, NAT, "KUBE-NODEPORTS", text)
    assert counted == usual | {rule: RulePosition.ANYWHERE}
    assert list(usual.values()).count(RulePosition.LAST) == 1


def test_without_an_endpoint_or_a_node_port_on_localhost_nothing_is_counted() -> None:
    for each in (plan(NODE_PORT, endpoints=()), plan(CLUSTER_IP, EXTERNAL_IP, BALANCER)):
        assert service_entries(each, counts_localhost=True) == service_entries(each)
    v6 = dataclasses.replace(plan(NODE_PORT), family=Family.IPV6)
    assert service_entries(v6, counts_localhost=True) == service_entries(v6)


def test_an_endpoint_that_came_upon_itself_is_masqueraded() -> None:
    entries = rendered(plan(CLUSTER_IP))
    assert chain(entries, "KUBE-SEP-LAE4CYYNBDVVQRFA") == [
        "-s 10.1.0.1/32 -j KUBE-MARK-MASQ",
        "-p tcp -m tcp -j DNAT --to-destination 10.1.0.1:8080",
    ]


def test_endpoints_stand_in_the_order_of_kube_proxy() -> None:
    """It sorts them as text; in another order every rule would be written anew when we take over."""
    endpoints = tuple(endpoint(f"10.1.0.{last}") for last in (2, 10, 100))
    entries = rendered(plan(CLUSTER_IP, endpoints=endpoints))
    notes = entries[Chain(Family.IPV4, NAT, SVC)]
    assert isinstance(notes, tuple)
    order = [rule.split('"')[1].partition(" -> ")[2] for rule in notes[1:]]
    assert order == ["10.1.0.100:8080", "10.1.0.10:8080", "10.1.0.2:8080"]


def test_a_client_that_was_here_goes_to_the_same_endpoint() -> None:
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


def test_a_load_balancer_may_ask_whatever_endpoints_there_are() -> None:
    asked = dataclasses.replace(plan(CLUSTER_IP, endpoints=()), health_check_node_port=32000)
    assert shared(rendered(asked), FILTER, "KUBE-NODEPORTS") == ["-p tcp -m tcp --dport 32000 -j ACCEPT"]


@pytest.mark.parametrize(("protocol", "name"), [(Protocol.UDP, "udp"), (Protocol.SCTP, "sctp")])
def test_other_protocols_are_matched_as_such(protocol: Protocol, name: str) -> None:
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
