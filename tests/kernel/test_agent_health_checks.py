"""A load balancer asks nodes at the healthCheckNodePort of a Service which of them has endpoints."""

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

import pytest

from ebpfproxy.lab import Pod
from tests.kernel.cluster import Cluster, Exposed, elsewhere, eventually, terminating
from tests.kernel.ipvs_here import skip_without_ipvs

pytestmark = pytest.mark.kernel

PORTS = {"shared": 32100, "rough": 32101}


class Told(NamedTuple):
    """`code` 0: nobody answers."""

    code: int
    endpoints: int = 0
    weight: str = ""


def balanced(cluster: Cluster, port: int) -> Exposed:
    return cluster.service(
        node_port=True, type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=port
    )


def told(client: Pod, address: str, port: int) -> Told:
    """What a client there hears at an address of the node."""
    host = f"[{address}]" if ":" in address else address

    def ask() -> Told:
        try:
            answer: Any = urllib.request.urlopen(f"http://{host}:{port}/healthz", timeout=5)
        except urllib.error.HTTPError as rejection:
            answer = rejection
        except OSError:
            return Told(0)
        body = json.loads(answer.read())
        return Told(answer.code, body["localEndpoints"], answer.headers["X-Load-Balancing-Endpoint-Weight"])

    return client.call(ask)


def test_a_load_balancer_learns_which_endpoints_are_here(cluster: Cluster) -> None:
    web, port = balanced(cluster, PORTS["shared"]), PORTS["shared"]
    outside, node = cluster.lab.outside, cluster.node
    web.to(cluster.a, cluster.b, elsewhere(cluster.c))
    for address in (node.v4, node.v6):
        eventually(lambda of=address: told(outside, of, port).code == 200, f"{address} answers")  # type: ignore[misc]
        assert told(outside, address, port) == Told(200, 2, "2")
    web.to(terminating(cluster.a), elsewhere(cluster.b))
    assert told(outside, node.v4, port) == Told(503, 0, "0")
    web.to(cluster.a, externalTrafficPolicy="Cluster", healthCheckNodePort=0)
    eventually(lambda: told(outside, node.v4, port) == Told(0), "nobody asks any more")


@pytest.mark.parametrize("mode", ["ebpf", "iptables", "ipvs"])
def test_no_health_check_outlives_its_service(rough: Cluster, mode: str) -> None:
    """Regression: calico #8112: after a restart of the proxy nobody knew of the sockets of before."""
    skip_without_ipvs(mode)
    port, flags = PORTS["rough"], (f"--proxy-mode={mode}", "--iptables-min-sync-period=0s")

    def heard() -> int:
        return told(rough.lab.outside, rough.node.v4, port).code

    rough.start(*flags)
    web = balanced(rough, port).to(rough.a)
    eventually(lambda: heard() == 200, "it answers")
    rough.agent.kill()
    assert heard() == 0
    rough.start(*flags)
    eventually(lambda: heard() == 200, "it answers after a restart")
    rough.write(web.name)
    eventually(lambda: heard() == 0, "a Service that goes takes it along")
    web.to(rough.a)
    eventually(lambda: heard() == 200, "it answers again")
    rough.end()
    rough.write(web.name)
    rough.start(*flags)
    assert heard() == 0


def test_health_checks_are_answered_on_the_addresses_of_node_ports(rough: Cluster) -> None:
    """Regression: kubernetes issue 82163."""
    rough.start(f"--nodeport-addresses={rough.node.v4}/32")
    balanced(rough, PORTS["rough"]).to(rough.a)
    eventually(lambda: told(rough.p, rough.node.v4, PORTS["rough"]).code == 200, "it answers")
    gateway = f"10.244.{rough.lab.number}.1"
    assert told(rough.p, gateway, PORTS["rough"]) == Told(0)
