"""Services that change while they have clients, with regressions of other proxies."""

import threading
from collections.abc import Iterator

import pytest

from ebpfproxy.bench.load import Load
from ebpfproxy.lab import Pod, manifests
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, answers, connected, converse, outcome
from tests.kernel.cluster import TCP_TARGET, UDP_TARGET, Cluster

pytestmark = pytest.mark.kernel


def test_tcp_and_udp_of_one_port_number_have_separate_endpoints(cluster: Cluster) -> None:
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


def test_endpoints_whose_address_and_port_have_the_same_sum_are_distinct(cluster: Cluster) -> None:
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


def test_removed_endpoints_are_never_selected(cluster: Cluster) -> None:
    """Regression: kpng only ever wrote slots, so that those above the new count stayed."""
    web = cluster.service()
    pods = [cluster.a, cluster.b, cluster.c]
    for count in (3, 1, 2, 1, 3, 2):
        web.to(*pods[:count])
        found = answers(cluster.p, TCP, web.v4, 80, 60)
        assert set(found) == {pod.name for pod in pods[:count]}


def test_a_deleted_service_is_no_longer_reachable(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    cluster.write(web.name)
    assert outcome(cluster.p, TCP, web.v4, 80, 0.3) == SILENT
    assert outcome(cluster.p, TCP, cluster.node.v4, web.node_port) == REFUSED


def test_a_tcp_connection_survives_the_removal_of_its_endpoint(cluster: Cluster) -> None:
    """The endpoint closes the connection itself, as with kube-proxy."""
    web = cluster.service().to(cluster.a)
    with connected(cluster.p, TCP, web.v4, 80) as sock:
        web.to(cluster.b)
        assert converse(sock) == "a"
        assert sock.getpeername() == (web.v4, 80)
    cluster.write(web.name)


def test_a_reused_cluster_ip_leads_to_the_new_service(cluster: Cluster) -> None:
    previous = cluster.service().to(cluster.a)
    cluster.write(previous.name)
    latter = cluster.service()
    latter.v4, latter.v6 = previous.v4, previous.v6
    latter.to(cluster.b)
    assert set(answers(cluster.p, TCP, latter.v4, 80, 10)) == {"b"}


def test_only_the_new_address_answers_after_a_cluster_ip_changes(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a)
    previous, web.v4 = web.v4, "10.96.202.1"
    web.set()
    assert outcome(cluster.p, TCP, web.v4, 80) == "a"
    assert outcome(cluster.p, TCP, previous, 80, 0.3) == SILENT


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
