"""External and load balancer IPs that a namespace may have, and others, with --external-ip-cidrs."""

import pytest

from ebpfproxy.agent.protected_claims import NOT_PERMITTED
from tests.kernel.clients import REFUSED, SILENT, TCP, outcome
from tests.kernel.cluster import Cluster

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("mode", ["ebpf", "nftables", "iptables", "userspace"])
def test_only_addresses_of_permitted_networks_are_served(restartable: Cluster, mode: str) -> None:
    restartable.mode = mode
    agent = restartable.start("--external-ip-cidrs=default=198.51.100.0/25,other=198.51.100.128/25")
    permitted, foreign = "198.51.100.7", "198.51.100.200"
    web = restartable.service(type="LoadBalancer", externalIPs=[permitted, foreign])
    web.status = {"loadBalancer": {"ingress": [{"ip": "198.51.100.8"}, {"ip": "198.51.100.201"}]}}
    web.to(restartable.a)
    for client in (restartable.p, restartable.node):
        for address in (web.v4, permitted, "198.51.100.8"):
            assert outcome(client, TCP, address, 80) == "a"
        for address in (foreign, "198.51.100.201"):
            assert outcome(client, TCP, address, 80, 0.5) in (REFUSED, SILENT)
    refused = {line.values["address"] for line in agent.lines if NOT_PERMITTED in line.text}
    assert refused == {foreign, "198.51.100.201"}
    assert restartable.metric("ebpfproxy_protected_frontends") == 4  # two addresses, TCP and UDP
