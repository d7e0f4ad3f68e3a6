"""A tenant who writes Services and pods must not disturb other pods, the node or other nodes."""

import contextlib
import time
from collections.abc import Iterator

import pytest

from ebpfproxy.agent.listening_sockets import INTERVAL
from ebpfproxy.agent.protected_claims import NOT_SERVED, SERVED_BY_PROGRAM
from ebpfproxy.agent.reconciler import NOT_SERVED as REJECTED
from ebpfproxy.lab import manifests
from ebpfproxy.model.address import Protocol
from ebpfproxy.plan.protected_addresses import Protected
from tests.kernel.clients import REFUSED, TCP, UDP, outcome
from tests.kernel.cluster import EACH_SYNC, TCP_TARGET, Cluster, Exposed, eventually
from tests.kernel.conftest import MODES
from tests.kernel.ipvs_here import skip_without_ipvs

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])

PORTS = {TCP: 80, UDP: 53}
LOOPBACK = {"v4": "127.0.0.1", "v6": "::1"}


def at_loopback(cluster: Cluster) -> Exposed:
    """A Service whose load balancer is 127.0.0.1 and ::1, as minikube tunnel and Docker Desktop set it."""
    web = cluster.service(type="LoadBalancer")
    web.status = {"loadBalancer": {"ingress": [{"ip": address} for address in LOOPBACK.values()]}}
    return web.to(cluster.a)


@both_families
@both_protocols
def test_a_load_balancer_address_of_loopback_is_not_that_of_pods(
    cluster: Cluster, family: str, protocol: Protocol
) -> None:
    at_loopback(cluster)
    assert outcome(cluster.p, protocol, LOOPBACK[family], PORTS[protocol]) == REFUSED


@pytest.mark.backends("ebpf")
@both_families
@both_protocols
def test_a_load_balancer_address_of_loopback_serves_the_node(
    cluster: Cluster, family: str, protocol: Protocol
) -> None:
    at_loopback(cluster)
    assert outcome(cluster.node, protocol, LOOPBACK[family], PORTS[protocol]).split()[0] == "a"


SERVED = {TCP: 80, UDP: 53}
LOCAL_PODS = "--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth"
"""The flags of the agent in a lab."""


@contextlib.contextmanager
def program_of_the_node(cluster: Cluster) -> Iterator[None]:
    """Within the block, a program of the node listens at the ports of Services, for TCP at all addresses."""
    running = [cluster.node.serve(TCP, SERVED[TCP])]
    running += [cluster.node.serve(UDP, SERVED[UDP], address=at) for at in (cluster.node.v4, cluster.node.v6)]
    try:
        yield
    finally:
        for each in running:
            each.kill()


def answers(cluster: Cluster, family: str, protocol: Protocol) -> set[str]:
    """Who answers clients of each class at the node's address. "reset": a relay stopped to listen before it
    has accepted the connection."""
    address, port = getattr(cluster.node, family), SERVED[protocol]
    clients = cluster.lab.outside, cluster.p, cluster.node
    try:
        return {outcome(client, protocol, address, port).split()[0] for client in clients}
    except ConnectionResetError:
        return {"reset"}


@pytest.mark.backends("ebpf", "userspace")  # the plan decides; relays are processes that listen
def test_an_external_ip_takes_over_no_program_of_the_node(cluster: Cluster) -> None:
    """As long as a program listens, it has the address and port. Without one, the Service has them."""
    node = cluster.node
    since = len(cluster.agent.lines)
    cluster.service(externalIPs=[node.v4, node.v6]).to(cluster.a)
    cases = [(family, protocol) for family in ("v4", "v6") for protocol in (TCP, UDP)]
    for case in cases:
        assert answers(cluster, *case) == {"a"}, case
    if cluster.mode == "userspace":  # relays are no programs that keep their ports
        time.sleep(2 * INTERVAL)
        assert answers(cluster, *cases[0]) == {"a"}
    with program_of_the_node(cluster):
        for case in cases:
            eventually(lambda: answers(cluster, *case) == {node.name}, f"{case}: the program answers")  # noqa: B023
        cluster.agent.await_line(
            lambda line: NOT_SERVED in line.text and line.values["address"] == node.v4, since
        )
        cluster.service(externalIPs=[node.v4, node.v6]).to(cluster.a)
        for case in cases:
            assert answers(cluster, *case) == {node.name}, case
    for case in cases:
        eventually(lambda: answers(cluster, *case) == {"a"}, f"{case}: the Service answers again")  # noqa: B023


@pytest.mark.backends("ebpf", "userspace")  # the plan decides; relays are processes that listen
def test_a_program_that_listens_first_keeps_its_port(cluster: Cluster) -> None:
    node = cluster.node
    with program_of_the_node(cluster):
        time.sleep(INTERVAL + 1)  # the agent reads the sockets in this interval
        cluster.service(type="LoadBalancer", externalIPs=[node.v4]).to(cluster.a)
        balanced = cluster.service(type="LoadBalancer")
        balanced.status = {"loadBalancer": {"ingress": [{"ip": node.v6}]}}
        balanced.to(cluster.b)
        for family in "v4", "v6":
            for protocol in TCP, UDP:
                assert answers(cluster, family, protocol) == {node.name}, (family, protocol)


@contextlib.contextmanager
def node_local_dns(cluster: Cluster, web: Exposed) -> Iterator[None]:
    """Within the block, a program of the node serves the UDP port of a ClusterIP, as NodeLocal DNSCache does.

    It adds the address to a device of the node, and removes it when it ends (cmd/node-cache of
    kubernetes/dns). The device is loopback, because test kernels may have no dummy devices.
    """
    addresses = f"{web.v4}/32 dev lo", f"{web.v6}/128 dev lo nodad"
    cluster.lab.ip(cluster.node, *(f"addr add {each}" for each in addresses))
    running = [cluster.node.serve(UDP, SERVED[UDP], address=at) for at in (web.v4, web.v6)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
        cluster.lab.ip(cluster.node, *(f"addr del {each.removesuffix(' nodad')}" for each in addresses))


@pytest.mark.backends("ebpf", "nftables", "iptables", "userspace")
def test_a_program_at_a_cluster_ip_of_the_node_serves_the_node_and_its_pods(cluster: Cluster) -> None:
    """kube-proxy leaves it alone because of NOTRACK rules. The other port of the Service is still served."""
    web = cluster.service().to(cluster.a)
    others = [(client, at) for client in (cluster.p, cluster.node) for at in (web.v4, web.v6)]

    def answering(protocol: Protocol) -> set[str]:
        return {outcome(client, protocol, at, SERVED[protocol]).split()[0] for client, at in others}

    assert answering(UDP) == {"a"}
    since = len(cluster.agent.lines)
    with node_local_dns(cluster, web):
        eventually(lambda: answering(UDP) == {cluster.node.name}, "the program answers")
        assert answering(TCP) == {"a"}
        cluster.agent.await_line(
            lambda line: SERVED_BY_PROGRAM in line.text and line.values["address"] == web.v4, since
        )
        cluster.service().to(cluster.b)
        assert answering(UDP) == {cluster.node.name}
        source = f"--manifests={cluster.folder}", f"--hostname-override={cluster.lab.node_name}"
        found = cluster.ebpfproxy("verify", *source, *LOCAL_PODS, check=False)
        assert not found.returncode, found
    eventually(lambda: answering(UDP) == {"a"}, "the Service answers again")


def test_an_external_ip_does_not_take_over_the_api_server(cluster: Cluster) -> None:
    server = cluster.lab.outside
    running = [server.serve(TCP, port) for port in (SERVED[TCP], SERVED[TCP] + 1)]
    try:
        addresses = {"IPv4": server.v4, "IPv6": server.v6}
        of_api = [
            manifests.endpoint_slice(
                f"kubernetes-{family}", "kubernetes", [address], [manifests.port(SERVED[TCP])], family=family
            )
            for family, address in addresses.items()
        ]
        cluster.write("api", *of_api)
        cluster.service(externalIPs=[*addresses.values()]).to(cluster.a)
        for address in addresses.values():
            for client in cluster.p, cluster.node:
                assert outcome(client, TCP, address, SERVED[TCP]) == server.name
    finally:
        for each in running:
            each.kill()


@pytest.mark.same_for("mode")  # the plan decides
@pytest.mark.parametrize("mode", MODES)
def test_addresses_of_other_nodes_and_the_switch(restartable: Cluster, mode: str) -> None:
    skip_without_ipvs(mode)
    restartable.mode, flags = MODES[mode]
    other = restartable.lab.outside
    running = [
        each.serve(TCP, SERVED[TCP], address=address)
        for each, address in ((other, other.v4), (restartable.node, restartable.node.v6))
    ]
    try:
        manifests.write(restartable.folder / "other.yaml", manifests.node("other", [other.v4, other.v6]))
        restartable.service(externalIPs=[other.v4, restartable.node.v6]).to(restartable.a)
        restartable.start("--protected-addresses=nodes", *flags)
        for client in restartable.p, restartable.node:
            for server, address in (other, other.v4), (restartable.node, restartable.node.v6):
                eventually(
                    lambda: outcome(client, TCP, address, SERVED[TCP]) == server.name,  # noqa: B023
                    f"{client.name} reaches {server.name}, also after the previous mode was cleaned up",
                )
        source = f"--manifests={restartable.folder}", f"--hostname-override={restartable.lab.node_name}"
        for address, why in (
            (other.v4, Protected.OF_OTHER_NODE),
            (restartable.node.v6, Protected.OF_HOST_PROCESS),
        ):
            target = f"[{address}]:{SERVED[TCP]}"
            checked = *source, *LOCAL_PODS, "--protected-addresses=nodes", *flags
            explained = restartable.ebpfproxy("explain", target, *checked, check=False)
            assert why.meaning in explained.stdout, explained
        assert not restartable.ebpfproxy("verify", *checked, check=False).returncode
        restartable.start("--protected-addresses=none", *flags)
        assert outcome(restartable.p, TCP, other.v4, SERVED[TCP]) == "a"
        assert outcome(restartable.p, TCP, restartable.node.v6, SERVED[TCP]) == "a"
    finally:
        for each in running:
            each.kill()


# Maps


def crowd(namespace: str, number: int, address: str) -> manifests.Object:
    """A Service with a maglev table: 2,048 slots."""
    annotations = {"ebpfproxy/lb-algorithm": "maglev"}
    return manifests.service(
        f"web-{number}", [address], [manifests.port(80)], namespace=namespace, annotations=annotations
    )


def test_a_tenant_with_large_services_leaves_room_for_others(restartable: Cluster) -> None:
    """Two tables filled the map. Another tenant's Services kept removed endpoints, and new ones failed."""
    agent = restartable.start("--ebpf-slots-max=4096", EACH_SYNC)
    web = restartable.service().to(restartable.a, restartable.b)
    pods = [restartable.a.v4, restartable.b.v4]
    objects = []
    for number in range(8):
        objects.append(crowd("large", number, f"10.98.0.{number}"))
        targets = [manifests.port(TCP_TARGET)]
        slice_ = manifests.endpoint_slice(f"web-{number}", f"web-{number}", pods, targets, namespace="large")
        objects.append(slice_)
    restartable.write("large", *objects)
    line = agent.await_line(lambda line: REJECTED in line.text)
    assert "large/web-" in line.text
    assert "slots" in line.text
    assert restartable.metric("ebpfproxy_rejected_entries") > 0
    web.to(restartable.b)
    assert {outcome(restartable.p, TCP, web.v4, 80) for _ in range(20)} == {"b"}
    added = restartable.service().to(restartable.a)
    assert outcome(restartable.p, TCP, added.v4, 80) == "a"
    for number in range(8):  # without a table, they are served as well
        assert outcome(restartable.p, TCP, f"10.98.0.{number}", 80) in ("a", "b")
