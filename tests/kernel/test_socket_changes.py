"""Services that change while they have clients, with regressions of other proxies."""

import threading
from collections.abc import Iterator

import pytest

from ebpfproxy.bench.load import Load
from ebpfproxy.lab import Pod, manifests
from tests.kernel.clients import TCP, connected, converse
from tests.kernel.cluster import Cluster

pytestmark = pytest.mark.kernel


def test_a_tcp_connection_survives_the_removal_of_its_endpoint(cluster: Cluster) -> None:
    """The endpoint closes the connection itself, as with kube-proxy."""
    web = cluster.service().to(cluster.a)
    with connected(cluster.p, TCP, web.v4, 80) as sock:
        web.to(cluster.b)
        assert converse(sock) == "a"
        assert sock.getpeername() == (web.v4, 80)
    cluster.write(web.name)


@pytest.fixture
def load_servers(cluster: Cluster, load: Load) -> Iterator[list[Pod]]:
    """Three pods with the C server for many connections, on port 9090 over TCP and UDP."""
    pods = [cluster.a, cluster.b, cluster.c]
    servers = [load.serve(pod, 9090) for pod in pods]
    yield pods
    for server in servers:
        server.kill()
        server.wait()


def test_no_connection_fails_while_endpoints_come_and_go(
    cluster: Cluster, load: Load, load_servers: list[Pod], request: pytest.FixtureRequest
) -> None:
    """Regression: kpng's slots referred to removed endpoints between two map writes.

    TCP connections while the endpoints change every 10 ms. There is always at least one endpoint.
    """
    name, vip, vip6 = "flap", "10.96.203.1", "fd00:10:96:203::1"
    connects = 2 * request.config.getoption("--connects")

    def put(count: int, shift: int) -> None:
        chosen = [load_servers[(shift + i) % 3] for i in range(count)]
        port = [manifests.port(9090)]
        manifests.write(
            cluster.folder / "flap-endpoints.yaml",
            manifests.endpoint_slice("flap-4", name, [pod.v4 for pod in chosen], port),
            manifests.endpoint_slice("flap-6", name, [pod.v6 for pod in chosen], port),
        )

    put(3, 0)
    cluster.write(name, manifests.service(name, [vip, vip6], [manifests.port(80)]))
    over = threading.Event()
    syncs = len(cluster.agent.lines)

    def flap() -> None:
        change = 0
        while not over.wait(0.01):
            change += 1
            put(1 + change % 3, change // 3)

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        report = load.churn(cluster.p, load.targets("flap", [(vip, 80), (vip6, 80)]), count=connects)
    finally:
        over.set()
        flapping.join()
    assert (report["failed"], report["errors"], report["attempts"]) == (0, {}, connects)
    assert len(cluster.agent.lines) - syncs > 10, "the endpoints did not change during the connections"
