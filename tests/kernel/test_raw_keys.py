"""`dump -o wide` shows the keys of the entries in the maps."""

import contextlib

import pytest

from ebpfproxy.backends.ebpf.inspect.raw_keys import MAPS, raw_key
from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.cli.dump_sections import SECTIONS
from ebpfproxy.lab import sockets
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Protocol
from tests.kernel.cluster import Cluster, Exposed, elsewhere

pytestmark = [pytest.mark.kernel, pytest.mark.backends("ebpf")]


@pytest.fixture
def web(cluster: Cluster) -> Exposed:
    """Services with entries in all maps: source ranges, NodePorts without endpoints, affinities and flows."""
    cluster.service(node_port=True, type="NodePort").to()
    balanced = cluster.service(type="LoadBalancer", loadBalancerSourceRanges=["10.0.0.0/8", "fd00::/8"])
    balanced.status = {"loadBalancer": {"ingress": [{"ip": "192.0.2.20"}, {"ip": "2001:db8::20"}]}}
    balanced.to(cluster.b)
    web = cluster.service(node_port=True, type="NodePort", sessionAffinity="ClientIP")
    web.to(cluster.a, elsewhere(cluster.b))
    for address in (cluster.node.v4, cluster.node.v6):
        cluster.lab.outside.call(lambda to=address: sockets.ask(Protocol.TCP, to, web.node_port))  # type: ignore[misc]
    cluster.p.call(lambda: sockets.ask(Protocol.TCP, web.v4, 80))
    return web


def test_each_row_has_the_key_of_its_entry(cluster: Cluster, web: Exposed) -> None:
    maps = Pins(cluster.lab.bpffs).hooked_in() / "maps"
    with contextlib.closing(View(cluster.lab.bpffs)) as view:
        for section, name in MAPS.items():
            rows = [row._asdict() for row in SECTIONS[section].rows(view)]
            assert rows, section
            with contextlib.closing(Map.pinned(maps / name)) as entries:
                for row in rows:
                    key = raw_key(section, row)
                    assert key
                    assert entries.lookup(key) is not None, (section, row)
            keys = [raw_key(section, row) for row in rows]
            assert len(set(keys)) == len(keys), section


def test_a_wide_table_shows_the_keys(cluster: Cluster, web: Exposed) -> None:
    shown = cluster.ebpfproxy("dump", "services", "-o=wide", f"--address={web.v4}").stdout
    assert " KEY" in shown
    assert "00 00 00 00 00 00 00 00 00 00 ff ff 0a 60 " in shown
    assert "KEY" not in cluster.ebpfproxy("dump", "services").stdout
    assert '"key"' not in cluster.ebpfproxy("dump", "services", "-o=json").stdout
