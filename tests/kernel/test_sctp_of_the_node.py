"""What an SCTP Service changes on its node in mode ebpf: SCTP sockets run no hook at connect()."""

from collections.abc import Iterator

import pytest

from ebpfproxy.lab import Lab
from ebpfproxy.lab.manifests import Object, port
from ebpfproxy.linux.netlink import reinjection
from tests.kernel.clients import TCP, UDP, outcome
from tests.kernel.cluster import EACH_SYNC, Cluster, Exposed

pytestmark = pytest.mark.kernel


class _WithSctp(Exposed):
    def objects(self) -> list[Object]:
        service, *slices = super().objects()
        service["spec"]["ports"].append(port(3868, name="sctp", protocol="SCTP"))
        return [service, *slices]


@pytest.fixture
def own() -> Iterator[Cluster]:
    with Lab("test-sctp", 1) as lab, Cluster(lab) as cluster:
        cluster.start(EACH_SYNC, "--sync-period=2s")
        yield cluster


def _loopback_programs(cluster: Cluster) -> int:
    rows = cluster.ebpfproxy("dump", "devices").stdout.splitlines()
    return sum("lo" in row.split()[:2] for row in rows)


def test_with_an_sctp_service_the_nodes_packets_are_translated_and_tcp_works_as_before(own: Cluster) -> None:
    """The pair and the program stay until an agent starts without SCTP Services: associations need them."""
    plain = own.service(node_port=True).to(own.a)
    assert not own.node.call(reinjection.has_pair)
    assert _loopback_programs(own) == 0
    extra = own.service(node_port=True)
    sctp = _WithSctp(own, extra.name, extra.v4, extra.v6, extra.node_port, extra.spec).to(own.a)
    assert own.node.call(reinjection.has_pair)
    assert _loopback_programs(own) == 1
    own.ebpfproxy("verify", f"--manifests={own.folder}", f"--hostname-override={own.lab.node_name}")
    for web in (plain, sctp):
        for protocol, number in ((TCP, 80), (UDP, 53)):
            assert outcome(own.node, protocol, web.v4, number) == "a"
            assert outcome(own.node, protocol, own.node.v4, web.node_port) == "a"
            assert outcome(own.node, protocol, "127.0.0.1", web.node_port) == "a"
            assert outcome(own.p, protocol, web.v6, number) == "a"
    own.end()
    own.write(sctp.name)
    own.start(EACH_SYNC, "--sync-period=2s")
    assert not own.node.call(reinjection.has_pair)
    assert _loopback_programs(own) == 0
