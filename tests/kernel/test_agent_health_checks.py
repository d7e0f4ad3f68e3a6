"""The healthCheckNodePort of a Service, at which a load balancer finds the nodes with endpoints."""

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


class Response(NamedTuple):
    """`code` 0: no server answers."""

    code: int
    endpoints: int = 0
    weight: str = ""


def balanced(cluster: Cluster, port: int) -> Exposed:
    return cluster.service(
        node_port=True, type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=port
    )


def health_check(client: Pod, address: str, port: int) -> Response:
    """The response that the client gets at an address of the node."""
    host = f"[{address}]" if ":" in address else address

    def ask() -> Response:
        try:
            answer: Any = urllib.request.urlopen(f"http://{host}:{port}/healthz", timeout=5)
        except urllib.error.HTTPError as rejection:
            answer = rejection
        except OSError:
            return Response(0)
        body = json.loads(answer.read())
        return Response(
            answer.code, body["localEndpoints"], answer.headers["X-Load-Balancing-Endpoint-Weight"]
        )

    return client.call(ask)


def test_health_check_reports_the_number_of_local_endpoints(cluster: Cluster) -> None:
    web, port = balanced(cluster, PORTS["shared"]), PORTS["shared"]
    outside, node = cluster.lab.outside, cluster.node
    web.to(cluster.a, cluster.b, elsewhere(cluster.c))
    for address in (node.v4, node.v6):
        eventually(lambda of=address: health_check(outside, of, port).code == 200, f"{address} answers")  # type: ignore[misc]
        assert health_check(outside, address, port) == Response(200, 2, "2")
    web.to(terminating(cluster.a), elsewhere(cluster.b))
    assert health_check(outside, node.v4, port) == Response(503, 0, "0")
    web.to(cluster.a, externalTrafficPolicy="Cluster", healthCheckNodePort=0)
    eventually(lambda: health_check(outside, node.v4, port) == Response(0), "the health check port is closed")


@pytest.mark.parametrize("mode", ["ebpf", "iptables", "ipvs"])
def test_health_check_closes_with_its_service(rough: Cluster, mode: str) -> None:
    """Regression: calico #8112: after a restart the proxy did not know its previous sockets."""
    skip_without_ipvs(mode)
    port, flags = PORTS["rough"], (f"--proxy-mode={mode}", "--iptables-min-sync-period=0s")

    def status() -> int:
        return health_check(rough.lab.outside, rough.node.v4, port).code

    rough.start(*flags)
    web = balanced(rough, port).to(rough.a)
    eventually(lambda: status() == 200, "it answers")
    rough.agent.kill()
    assert status() == 0
    rough.start(*flags)
    eventually(lambda: status() == 200, "it answers after a restart")
    rough.write(web.name)
    eventually(lambda: status() == 0, "a deleted Service's port is closed")
    web.to(rough.a)
    eventually(lambda: status() == 200, "it answers again")
    rough.end()
    rough.write(web.name)
    rough.start(*flags)
    assert status() == 0


def test_health_checks_answer_only_on_nodeport_addresses(rough: Cluster) -> None:
    """Regression: kubernetes issue 82163."""
    rough.start(f"--nodeport-addresses={rough.node.v4}/32")
    balanced(rough, PORTS["rough"]).to(rough.a)
    eventually(lambda: health_check(rough.p, rough.node.v4, PORTS["rough"]).code == 200, "it answers")
    gateway = f"10.244.{rough.lab.number}.1"
    assert health_check(rough.p, gateway, PORTS["rough"]) == Response(0)
