"""Session affinity ClientIP. On the socket path a client is the pod's address, or its network namespace."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from ebpfproxy.lab import Netns, Pod
from tests.kernel.clients import TCP, UDP, Dial, answers, new_ports, outcome_of
from tests.kernel.cluster import Cluster, Exposed, eventually
from tests.kernel.scenarios import PORTS, Row, Scenarios, Stage, Steps
from tests.kernel.test_pod_namespaces import await_socket_path
from tests.support.foreign_sockets import creating_in

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(1800)]

scenario: Scenarios[Stage] = Scenarios()
but_ipvs = scenario.only("ebpf", "nftables", "iptables")
"""An IPVS template keeps the timeout that it was created with. It remains while one of its connections is
remembered, which is two minutes for a closed one (ip_vs_sched_persist, ip_vs_conn_expire)."""
LONG = 3600
MANY = 20
"""Services that select independently: all of them agree by chance once in 10^9 runs."""


def test_clients_get_the_endpoints_of_each_scenario(cluster: Cluster) -> None:
    scenario.run(cluster, lambda: Stage(cluster))


def sticky(at: Stage, timeout: int = LONG, **spec: Any) -> Exposed:
    return at.service(*pods(at), sessionAffinity="ClientIP", sessionAffinityConfig=config(timeout), **spec)


def pods(at: Stage) -> tuple[Pod, ...]:
    return at.cluster.a, at.cluster.b, at.cluster.c


def config(timeout: int) -> dict[str, object]:
    return {"clientIP": {"timeoutSeconds": timeout}}


def chosen(client: Netns, webs: Sequence[Exposed]) -> list[str]:
    """The endpoint of each Service."""
    return one_by_one(client, [Dial(TCP, web.v4, 80) for web in webs])


def one_by_one(client: Netns, dials: Sequence[Dial]) -> list[str]:
    return [outcome_of(dial, creating_in(client)) for dial in dials]


def only(client: Netns, web: Exposed, count: int = 10) -> str:
    """The one endpoint of so many connections."""
    (one,) = answers(client, TCP, web.v4, 80, count)
    return one


@scenario
def a_client_keeps_its_endpoint(at: Stage) -> Steps:
    web = sticky(at)
    yield ()
    for client, protocol in itertools.product(at.clients, PORTS):
        assert len(answers(client, protocol, web.v4, PORTS[protocol], 40)) == 1


@scenario
def two_clients_do_not_always_get_the_same_endpoint(at: Stage) -> Steps:
    webs = [sticky(at) for _ in range(MANY)]
    yield ()
    assert chosen(at.cluster.p, webs) != chosen(at.cluster.q, webs)


@scenario.only("ebpf")
def the_cluster_ip_and_the_node_port_of_a_port_share_the_affinity(at: Stage) -> Steps:
    """As in iptables, which has one `recent` list per ServicePort and endpoint, for all frontends."""
    webs = [sticky(at, node_port=True) for _ in range(5)]
    yield ()
    names = chosen(at.cluster.p, webs)
    node = at.cluster.node.v4
    assert names == one_by_one(at.cluster.p, [Dial(TCP, node, web.node_port) for web in webs])


@but_ipvs
def a_pod_has_one_endpoint_at_a_cluster_ip_and_at_a_restricted_load_balancer(at: Stage) -> Steps:
    """In mode ebpf, packets to the latter take the packet path. By chance, both agree on 8 Services once in
    6,561 runs."""
    pod = at.cluster.p
    if at.cluster.mode == "ebpf":
        await_socket_path(at.cluster, pod)
    addresses = [f"203.0.113.{number}" for number in range(200, 208)]
    ranges = [f"{pod.v4}/32"]
    webs = [sticky(at, type="LoadBalancer", loadBalancerSourceRanges=ranges) for _ in addresses]
    for web, address in zip(webs, addresses, strict=True):
        web.status = {"loadBalancer": {"ingress": [{"ip": address}]}}
    yield ()
    assert chosen(pod, webs) == one_by_one(pod, [Dial(TCP, address, 80) for address in addresses])


@scenario
def two_ports_of_a_service_do_not_share_the_affinity(at: Stage) -> Steps:
    """With round robin they would, but for the other client."""
    webs = [sticky(at) for _ in range(MANY)]
    yield ()
    chosen(at.cluster.q, webs)
    udp = [Dial(UDP, web.v4, 53, source=("", next(new_ports))) for web in webs]
    assert chosen(at.cluster.p, webs) != one_by_one(at.cluster.p, udp)


@but_ipvs
def affinity_ends_after_its_timeout_without_a_connection(at: Stage) -> Steps:
    webs = [sticky(at, timeout=1) for _ in range(MANY)]
    yield ()
    before = chosen(at.cluster.p, webs)
    time.sleep(1.05)  # the tested condition: a client that is silent for this time
    assert chosen(at.cluster.p, webs) != before


@scenario
def each_connection_renews_the_affinity(at: Stage) -> Steps:
    web = sticky(at, timeout=2)
    yield ()

    def dials() -> tuple[float, set[str]]:
        """The longest silence, in seconds, and the endpoints that answered."""
        found = set()
        moments = [time.monotonic()]
        while moments[-1] - moments[0] < 4.5:
            found.add(only(at.cluster.p, web, 1))
            moments.append(time.monotonic())
            time.sleep(0.5)  # the tested condition: a client that is never silent for the timeout
        return max(later - earlier for earlier, later in itertools.pairwise(moments)), found

    silence, found = dials()
    while silence > 1.5:  # this machine was too busy
        silence, found = dials()
    assert len(found) == 1


@scenario
def a_client_whose_endpoint_is_removed_keeps_its_new_endpoint(at: Stage) -> Steps:
    """Its first endpoint may be before or after the new one in the order of endpoints."""
    webs = [sticky(at) for _ in range(4)]
    yield ()
    first = {web: only(at.cluster.p, web) for web in webs}
    for web in webs:
        web.backends = tuple(pod for pod in pods(at) if pod.name != first[web])
    yield ()
    second = {web: only(at.cluster.p, web) for web in webs}
    assert all(second[web] != first[web] for web in webs)
    for web in webs:
        web.backends = pods(at)
    yield ()
    assert {web: only(at.cluster.p, web) for web in webs} == second


@scenario
def changes_of_other_endpoints_do_not_move_a_client(at: Stage) -> Steps:
    web = sticky(at)
    yield ()
    name = only(at.cluster.p, web)
    own = next(pod for pod in pods(at) if pod.name == name)
    other = next(pod for pod in pods(at) if pod is not own)
    for present in ((own,), pods(at), (own, other)):
        web.backends = present
        yield ()
        assert only(at.cluster.p, web) == name


@scenario
def affinity_can_be_turned_off(at: Stage) -> Steps:
    web = sticky(at)
    yield ()
    only(at.cluster.p, web)
    web.spec["sessionAffinity"] = "None"
    yield [Row(at.cluster.p, TCP, web.v4, 80, frozenset("abc"))]


@but_ipvs
def affinity_that_is_turned_off_and_on_forgets_earlier_choices(at: Stage) -> Steps:
    webs = [sticky(at) for _ in range(MANY)]
    yield ()
    before = chosen(at.cluster.p, webs)
    for affinity in ("None", "ClientIP"):
        for web in webs:
            web.spec["sessionAffinity"] = affinity
        yield ()
    assert chosen(at.cluster.p, webs) != before


@but_ipvs
def a_shortened_timeout_applies_to_existing_clients(at: Stage) -> Steps:
    webs = [sticky(at) for _ in range(MANY)]
    yield ()
    before = chosen(at.cluster.p, webs)
    for web in webs:
        web.spec["sessionAffinityConfig"] = config(1)
    yield ()

    def moves() -> bool:
        time.sleep(1.05)  # the tested condition: a client that is silent for this time
        return chosen(at.cluster.p, webs) != before

    eventually(moves, "a client moves")  # in mode nftables, once a connection has set the new timeout
