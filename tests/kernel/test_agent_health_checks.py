"""The healthCheckNodePort of a Service, at which a load balancer finds the nodes with endpoints."""

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

import pytest

from ebpfproxy.lab import Pod
from tests.kernel.cluster import Cluster, Exposed, elsewhere, eventually, terminating

pytestmark = pytest.mark.kernel

PORTS = {"shared": 32100, "restartable": 32101}


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


def test_health_checks_answer_only_on_nodeport_addresses(restartable: Cluster) -> None:
    """Regression: kubernetes issue 82163."""
    restartable.start(f"--nodeport-addresses={restartable.node.v4}/32")
    balanced(restartable, PORTS["restartable"]).to(restartable.a)
    eventually(
        lambda: health_check(restartable.p, restartable.node.v4, PORTS["restartable"]).code == 200,
        "it answers",
    )
    gateway = f"10.244.{restartable.lab.number}.1"
    assert health_check(restartable.p, gateway, PORTS["restartable"]) == Response(0)
