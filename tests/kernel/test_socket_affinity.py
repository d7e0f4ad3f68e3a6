"""Session affinity ClientIP. On the socket path a client is the pod's address, or its network namespace."""

import collections
import itertools
import time
from typing import Any

import pytest

from ebpfproxy.lab import Netns
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, UDP, answers, outcome
from tests.kernel.cluster import Cluster, Exposed, eventually
from tests.kernel.test_pod_namespaces import await_socket_path

pytestmark = pytest.mark.kernel

but_ipvs = pytest.mark.backends("ebpf", "nftables", "iptables")
"""An IPVS template keeps the timeout that it was created with. It remains while one of its connections is
remembered, which is two minutes for a closed one (ip_vs_sched_persist, ip_vs_conn_expire)."""
LONG = 3600
PORTS = {TCP: 80, UDP: 53}


def sticky(cluster: Cluster, timeout: int = LONG, **spec: Any) -> Exposed:
    return cluster.service(**spec).to(
        cluster.a, cluster.b, cluster.c, sessionAffinity="ClientIP", sessionAffinityConfig=config(timeout)
    )


def config(timeout: int) -> dict[str, object]:
    return {"clientIP": {"timeoutSeconds": timeout}}


def only(found: "collections.Counter[str]") -> str:
    (one,) = found
    return one


@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
@pytest.mark.parametrize("client", ["pod", "node"])
def test_a_client_keeps_its_endpoint(cluster: Cluster, client: str, protocol: Protocol) -> None:
    web = sticky(cluster)
    assert len(answers(cluster.client(client), protocol, web.v4, PORTS[protocol], 40)) == 1


def test_without_affinity_a_clients_connections_are_spread(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a, cluster.b, cluster.c)
    assert len(answers(cluster.p, TCP, web.v4, 80, 60)) == 3


def test_two_clients_do_not_always_get_the_same_endpoint(cluster: Cluster) -> None:
    """Each Service selects independently: both clients agree on 40 Services in a row once in 10^19 runs."""

    def differ() -> bool:
        web = sticky(cluster)
        return outcome(cluster.p, TCP, web.v4, 80) != outcome(cluster.q, TCP, web.v4, 80)

    assert any(differ() for _ in range(40))


@pytest.mark.backends("ebpf")
def test_the_cluster_ip_and_the_node_port_of_a_port_share_the_affinity(cluster: Cluster) -> None:
    """As in iptables, which has one `recent` list per ServicePort and endpoint, for all frontends."""
    for _ in range(5):
        web = sticky(cluster, node_port=True)
        chosen = only(answers(cluster.p, TCP, web.v4, 80, 3))
        assert only(answers(cluster.p, TCP, cluster.node.v4, web.node_port, 3)) == chosen


@but_ipvs
def test_a_pod_has_one_endpoint_at_a_cluster_ip_and_at_a_restricted_load_balancer(cluster: Cluster) -> None:
    """In mode ebpf, packets to the latter take the packet path. By chance, both agree on 8 Services once in
    6,561 runs."""
    if cluster.mode == "ebpf":
        await_socket_path(cluster, cluster.p)
    for number in range(8):
        web = sticky(cluster, type="LoadBalancer")
        web.status = {"loadBalancer": {"ingress": [{"ip": f"203.0.113.{200 + number}"}]}}
        web.set(loadBalancerSourceRanges=[f"{cluster.p.v4}/32"])
        chosen = outcome(cluster.p, TCP, web.v4, 80)
        assert outcome(cluster.p, TCP, f"203.0.113.{200 + number}", 80) == chosen


def test_two_ports_of_a_service_do_not_share_the_affinity(cluster: Cluster) -> None:
    """As above: both ports agree on 40 Services in a row once in 10^19 runs, and never with round robin."""

    def differ(netns: Netns) -> bool:
        web = sticky(cluster)
        outcome(cluster.q, TCP, web.v4, 80)
        return outcome(netns, TCP, web.v4, 80) != outcome(netns, UDP, web.v4, 53)

    assert any(differ(cluster.p) for _ in range(40))


@but_ipvs
def test_affinity_ends_after_its_timeout_without_a_connection(cluster: Cluster) -> None:
    """The timeout is 1 second. The selection is repeated until the client gets another endpoint."""
    web = sticky(cluster, timeout=1)

    def moves() -> bool:
        chosen = only(answers(cluster.p, TCP, web.v4, 80, 5))
        time.sleep(1.05)  # the tested condition: a client that is silent for this time
        return outcome(cluster.p, TCP, web.v4, 80) != chosen

    assert any(moves() for _ in range(20))


def test_each_connection_renews_the_affinity(cluster: Cluster) -> None:
    web = sticky(cluster, timeout=2)

    def dials() -> tuple[float, set[str]]:
        """The longest silence, in seconds, and the endpoints that answered."""
        found = set()
        moments = [time.monotonic()]
        while moments[-1] - moments[0] < 4.5:
            found.add(only(answers(cluster.p, TCP, web.v4, 80, 1)))
            moments.append(time.monotonic())
            time.sleep(0.5)  # the tested condition: a client that is never silent for the timeout
        return max(later - earlier for earlier, later in itertools.pairwise(moments)), found

    silence, found = dials()
    while silence > 1.5:  # this machine was too busy
        silence, found = dials()
    assert len(found) == 1


def test_a_client_whose_endpoint_is_removed_keeps_its_new_endpoint(cluster: Cluster) -> None:
    """Its first endpoint may be before or after the new one in the order of endpoints."""
    pods = [cluster.a, cluster.b, cluster.c]
    for _ in range(4):
        web = sticky(cluster)
        chosen = only(answers(cluster.p, TCP, web.v4, 80, 5))
        web.to(*(pod for pod in pods if pod.name != chosen))
        other = only(answers(cluster.p, TCP, web.v4, 80, 20))
        assert other != chosen
        web.to(*pods)
        assert only(answers(cluster.p, TCP, web.v4, 80, 20)) == other


def test_changes_of_other_endpoints_do_not_move_a_client(cluster: Cluster) -> None:
    web = sticky(cluster)
    pods = [cluster.a, cluster.b, cluster.c]
    chosen = only(answers(cluster.p, TCP, web.v4, 80, 5))
    own = next(pod for pod in pods if pod.name == chosen)
    for present in ([own], pods, [own, *(pod for pod in pods if pod is not own)][:2]):
        web.to(*present)
        assert only(answers(cluster.p, TCP, web.v4, 80, 10)) == chosen


def test_affinity_can_be_turned_off(cluster: Cluster) -> None:
    web = sticky(cluster)
    answers(cluster.p, TCP, web.v4, 80, 3)
    web.set(sessionAffinity="None")
    assert len(answers(cluster.p, TCP, web.v4, 80, 60)) == 3


@but_ipvs
def test_affinity_that_is_turned_off_and_on_forgets_earlier_choices(cluster: Cluster) -> None:
    """The client gets a new endpoint each time."""
    web = sticky(cluster)

    def moves() -> bool:
        chosen = only(answers(cluster.p, TCP, web.v4, 80, 3))
        web.set(sessionAffinity="None")
        web.set(sessionAffinity="ClientIP")
        return only(answers(cluster.p, TCP, web.v4, 80, 3)) != chosen

    assert any(moves() for _ in range(40))


@but_ipvs
def test_a_shortened_timeout_applies_to_existing_clients(cluster: Cluster) -> None:
    web = sticky(cluster)
    chosen = only(answers(cluster.p, TCP, web.v4, 80, 3))
    web.set(sessionAffinityConfig=config(1))
    eventually(lambda: _silent_then(cluster, web) != chosen, "the client moves", patience=30)


def _silent_then(cluster: Cluster, web: Exposed) -> str:
    time.sleep(1.05)  # the tested condition
    return outcome(cluster.p, TCP, web.v4, 80)
