"""Services that change under their clients: what collided, dangled or was left behind in other proxies."""

import threading
from collections.abc import Iterator

import pytest

from ebpfproxy.bench.load import Load
from ebpfproxy.lab import Pod, manifests
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, answers, connected, converse, outcome
from tests.kernel.cluster import TCP_TARGET, UDP_TARGET, Cluster

pytestmark = pytest.mark.kernel


def test_one_port_number_has_other_endpoints_over_tcp_than_over_udp(cluster: Cluster) -> None:
    """Regression: kpng's eBPF backend had no protocol in its key, so that 53/TCP and 53/UDP were one."""
    name, vip = "dns-both", "10.96.200.1"
    cluster.write(
        name,
        manifests.service(
            name, [vip], [manifests.port(53, name="tcp"), manifests.port(53, name="udp", protocol="UDP")]
        ),
        manifests.endpoint_slice("both-a", name, [cluster.a.v4], [manifests.port(TCP_TARGET, name="tcp")]),
        manifests.endpoint_slice(
            "both-b", name, [cluster.b.v4], [manifests.port(UDP_TARGET, name="udp", protocol="UDP")]
        ),
    )
    assert set(answers(cluster.p, TCP, vip, 53, 20)) == {"a"}
    assert set(answers(cluster.p, UDP, vip, 53, 20)) == {"b"}


def test_endpoints_whose_address_and_port_have_the_same_sum(cluster: Cluster) -> None:
    """Regression: kpng's backend id was address plus port, so that 10.0.0.1:81 was 10.0.0.2:80."""
    near = {
        (pod.v4, TCP_TARGET + offset): f"{pod.name}{offset}"
        for pod in (cluster.a, cluster.b, cluster.c)
        for offset in (700, 701, 702)
    }
    servers = []
    try:
        for pod in (cluster.a, cluster.b, cluster.c):
            for offset in (700, 701, 702):
                servers.append(pod.serve(Protocol.TCP, TCP_TARGET + offset, reply=f"{pod.name}{offset}"))
        for number, (address, port) in enumerate(near):
            name, vip = f"sum-{number}", f"10.96.201.{number + 1}"
            cluster.write(
                name,
                manifests.service(name, [vip], [manifests.port(80)]),
                manifests.endpoint_slice(name, name, [address], [manifests.port(port)]),
            )
        found = [outcome(cluster.p, TCP, f"10.96.201.{n + 1}", 80) for n in range(len(near))]
        assert found == list(near.values())
    finally:
        for server in servers:
            server.kill()


def test_endpoints_that_went_are_never_chosen_again(cluster: Cluster) -> None:
    """Regression: kpng only ever wrote slots, so that those above the new count stayed."""
    web = cluster.service()
    pods = [cluster.a, cluster.b, cluster.c]
    for count in (3, 1, 2, 1, 3, 2):
        web.to(*pods[:count])
        found = answers(cluster.p, TCP, web.v4, 80, 60)
        assert set(found) == {pod.name for pod in pods[:count]}


def test_a_service_that_goes_leaves_nothing(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    cluster.write(web.name)
    assert outcome(cluster.p, TCP, web.v4, 80, 0.3) == SILENT
    assert outcome(cluster.p, TCP, cluster.node.v4, web.node_port) == REFUSED


def test_a_connection_outlives_its_endpoints_removal(cluster: Cluster) -> None:
    """Over TCP: the endpoint ends it when it is ready to, as it does behind kube-proxy."""
    web = cluster.service().to(cluster.a)
    with connected(cluster.p, TCP, web.v4, 80) as sock:
        web.to(cluster.b)
        assert converse(sock) == "a"
        assert sock.getpeername() == (web.v4, 80)
    cluster.write(web.name)


def test_an_address_used_again_is_the_new_services(cluster: Cluster) -> None:
    previous = cluster.service().to(cluster.a)
    cluster.write(previous.name)
    latter = cluster.service()
    latter.v4, latter.v6 = previous.v4, previous.v6
    latter.to(cluster.b)
    assert set(answers(cluster.p, TCP, latter.v4, 80, 10)) == {"b"}


def test_a_cluster_ip_that_changes(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a)
    previous, web.v4 = web.v4, "10.96.202.1"
    web.set()
    assert outcome(cluster.p, TCP, web.v4, 80) == "a"
    assert outcome(cluster.p, TCP, previous, 80, 0.3) == SILENT


@pytest.fixture
def crowd(cluster: Cluster, load: Load) -> Iterator[list[Pod]]:
    """Three pods that take many connections: their C servers answer on port 9090, TCP and UDP."""
    pods = [cluster.a, cluster.b, cluster.c]
    servers = [load.serve(pod, 9090) for pod in pods]
    yield pods
    for server in servers:
        server.kill()
        server.wait()


def test_no_connection_fails_while_endpoints_come_and_go(
    cluster: Cluster, load: Load, crowd: list[Pod], request: pytest.FixtureRequest
) -> None:
    """Regression: the window of dangling slots, in kpng the time between two map writes.

    Connections over TCP while the endpoints change every 10 ms, with at least one always there.
    """
    name, vip, vip6 = "flap", "10.96.203.1", "fd00:10:96:203::1"
    connects = 2 * request.config.getoption("--connects")

    def put(count: int, shift: int) -> None:
        chosen = [crowd[(shift + i) % 3] for i in range(count)]
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
    assert len(cluster.agent.lines) - syncs > 10, "the endpoints did change meanwhile"
