"""Connections to ClusterIPs that no Service has, and to ports that their Service does not have."""

import pytest

from ebpfproxy.lab import manifests
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, connected, outcome, socket_in
from tests.kernel.cluster import TCP_TARGET, Cluster, eventually
from tests.kernel.two_nodes import TwoNodes

pytestmark = pytest.mark.kernel

UNUSED = "10.96.200.7", "fd00:10:96::c807"
OUTSIDE = "10.98.200.7", "fd00:10:96:7::7"
SHORT = 0.5


@pytest.mark.parametrize("socket_lb", ["on", "host", "off"])
def test_mode_ebpf_refuses_them_for_every_client(restartable_pair: TwoNodes, socket_lb: str) -> None:
    at = restartable_pair
    at.start(f"--socket-lb={socket_lb}")
    web = at.service().to(at.a)
    for client in (at.p, at.node, at.x):
        for address, outside, served in zip(UNUSED, OUTSIDE, (web.v4, web.v6), strict=True):
            for protocol in (TCP, UDP):
                assert outcome(client, protocol, address, 80) == REFUSED
                assert outcome(client, protocol, served, 81) == REFUSED
                assert outcome(client, protocol, outside, 80, SHORT) == SILENT
            assert outcome(client, TCP, served, 80).startswith("a")
    (line,) = (each for each in at.http_get("metrics").splitlines() if 'reason="cluster_ip_unused"' in each)
    assert float(line.rpartition(" ")[2]) >= 3 * 2 * 2 * 2, "clients, families, protocols, kinds of addresses"


def test_without_the_service_cidr_routes_decide(restartable: Cluster) -> None:
    at = restartable
    at.start()
    at.service().to(at.a)
    assert outcome(at.p, TCP, UNUSED[0], 80) == REFUSED
    manifests.write(at.folder / "node.yaml", manifests.node(at.lab.node_name, [at.node.v4, at.node.v6]))
    eventually(lambda: outcome(at.p, TCP, UNUSED[0], 80, SHORT) == SILENT, "no address is refused")
    at.write_node()
    eventually(lambda: outcome(at.p, TCP, UNUSED[0], 80, SHORT) == REFUSED, "unused addresses are refused")


def test_a_program_of_the_node_serves_a_cluster_ip(restartable: Cluster) -> None:
    """As NodeLocal DNSCache: with the address on a device of the node."""
    at = restartable
    at.lab.ip(at.node, f"addr add {UNUSED[0]}/32 dev lo")
    try:
        at.start()
        at.service().to(at.a)
        with socket_in(at.node, TCP) as server:
            server.bind((UNUSED[0], 80))
            server.listen()
            for client in (at.p, at.node):
                connected(client, TCP, UNUSED[0], 80).close()
    finally:
        at.lab.ip(at.node, f"addr del {UNUSED[0]}/32 dev lo")


@pytest.mark.parametrize("socket_lb", ["on", "off"])
def test_another_proxy_of_the_node_may_translate_them(restartable: Cluster, socket_lb: str) -> None:
    """One for Services with the label service-proxy-name, which this agent does not serve."""
    at = restartable
    table = "\n".join(
        f"add table ip other\nadd chain ip other {hook} {{ type nat hook {hook} priority -100; }}\n"
        f"add rule ip other {hook} ip daddr {UNUSED[0]} tcp dport 80 dnat to {at.a.v4}:{TCP_TARGET}"
        for hook in ("prerouting", "output")
    )
    at.node.run(["nft", "-f", "-"], stdin=table)
    try:
        at.start(f"--socket-lb={socket_lb}")
        at.service().to(at.a)
        for client in (at.p, at.node):
            assert outcome(client, TCP, UNUSED[0], 80) == "a"
            assert outcome(client, TCP, UNUSED[0], 81) == REFUSED
    finally:
        at.node.run(["nft", "delete table ip other"])


def test_the_error_reaches_a_connected_datagram_socket(restartable: Cluster) -> None:
    at = restartable
    at.start()
    at.service().to(at.a)
    with socket_in(at.p, UDP) as client:
        client.connect((UNUSED[0], 53))
        client.send(b"question")
        with pytest.raises(ConnectionRefusedError):
            client.recv(100)


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_other_modes_drop_or_route_addresses_that_no_service_has(restartable: Cluster, mode: str) -> None:
    at = restartable
    at.mode = mode
    at.start()
    web = at.service().to(at.a)
    assert outcome(at.p, TCP, UNUSED[0], 80, SHORT) == SILENT
    assert outcome(at.p, TCP, web.v4, 81, SHORT) == (REFUSED if mode == "nftables" else SILENT)
