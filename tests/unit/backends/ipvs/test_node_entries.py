"""What all Services share: one property at a time. tests/golden has complete cases."""

import pytest

from ebpfproxy.backends.iptables import chains
from ebpfproxy.backends.iptables.entries import NAT, Chain
from ebpfproxy.backends.ipvs.entries import IpvsSettings
from ebpfproxy.backends.ipvs.node_entries import node_entries
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan

KINDS = ("CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL", "LOAD-BALANCER")


@pytest.mark.parametrize("kind", KINDS)
def test_an_address_of_the_node_that_is_a_services_too_is_not_masqueraded_as_a_node_port(kind: str) -> None:
    chain = node_entries(NodePlan(), Family.IPV4, IpvsSettings())[Chain(Family.IPV4, NAT, chains.SERVICES)]
    assert isinstance(chain, tuple)
    rules = list(map(str, chain))
    (node_port,) = (at for at, rule in enumerate(rules) if rule.endswith(f"-j {chains.NODE_PORT}"))
    accepted = [
        at
        for at, rule in enumerate(rules)
        if f"--match-set KUBE-{kind} dst,dst" in rule and rule.endswith("-j ACCEPT")
    ]
    assert accepted
    assert accepted[0] < node_port
