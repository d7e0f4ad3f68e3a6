"""iptables rules and sets of the IPVS backend are read back as written. The tests need no IPVS."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.iptables import cleanup as removal_of_iptables
from ebpfproxy.backends.iptables.entries import FILTER, MANGLE, NAT, Chain, Entry, Key, Rule, chains_of
from ebpfproxy.backends.iptables.families import TwoFamilies
from ebpfproxy.backends.ipvs import cleanup
from ebpfproxy.backends.ipvs.entries import LAYOUT, IpvsSettings, Member
from ebpfproxy.backends.ipvs.node_entries import node_entries
from ebpfproxy.backends.ipvs.sets import (
    LOAD_BALANCER_FW,
    LOAD_BALANCER_SOURCE_CIDR,
    LOAD_BALANCER_SOURCE_IP,
    NAMES,
    OWN_SETS,
    IpSets,
    create_all,
    set_name,
)
from ebpfproxy.lab import sockets
from ebpfproxy.linux import ipset
from ebpfproxy.linux.ipset import IpSet
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import ToolBackend
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.service_plan import LocalTraffic, NodePlan
from tests.kernel.iptables_testbed import empty_node, endpoints
from tests.kernel.loopback import add_addresses
from tests.support.build import service

pytestmark = pytest.mark.kernel

PODS = {
    "no local traffic detection": {},
    "by addresses": {
        Family.IPV4: LocalTraffic(parse_network("10.1.0.0/16")),
        Family.IPV6: LocalTraffic(parse_network("fd01::/64")),
    },
    "by a device": dict.fromkeys(Family, LocalTraffic(interface="cbr0")),
    "by everything": {Family.IPV4: LocalTraffic(parse_network("0.0.0.0/0"))},
}


@pytest.fixture
def _nowhere() -> Iterator[None]:
    with netns.throw_away():
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield


def rules(plan: NodePlan, settings: IpvsSettings) -> dict[Key, Entry]:
    wanted: dict[Key, Entry] = {}
    for of in Family:
        for key, entry in node_entries(plan, of, settings).items():
            if isinstance(key, Chain | Rule):
                assert isinstance(entry, tuple | int)
                wanted[key] = entry  # type: ignore[assignment]
    return wanted


def opened(tool_backend: ToolBackend) -> TwoFamilies:
    families = TwoFamilies(LAYOUT, (FILTER, NAT, MANGLE), cleanup.leftovers, create_all)
    families.open(tool_backend)
    return families


@pytest.mark.usefixtures("_nowhere")
@pytest.mark.parametrize("masquerade_all", [False, True])
@pytest.mark.parametrize("pods", PODS)
@pytest.mark.parametrize("tool_backend", ToolBackend)
def test_written_rules_are_read_back(tool_backend: ToolBackend, pods: str, masquerade_all: bool) -> None:
    for of in Family:
        create_all(of)
    wanted = rules(NodePlan(local_traffic=PODS[pods]), IpvsSettings(masquerade_all=masquerade_all))
    families = opened(tool_backend)
    assert not families.apply(diff(families.read(), wanted))
    assert families.read() == wanted
    families.close()


@pytest.mark.usefixtures("_nowhere")
@pytest.mark.parametrize("tool_backend", ToolBackend)
def test_kube_proxys_rules_per_load_balancer_in_table_filter_are_removed(
    tool_backend: ToolBackend,
) -> None:
    for of in Family:
        create_all(of)
    tool = iptables.find(Family.IPV4, tool_backend)
    tool.restore(
        "*filter\n:KUBE-IPVS-OUT-FILTER - [0:0]\n"
        "-A OUTPUT -j KUBE-IPVS-OUT-FILTER\n-A KUBE-IPVS-OUT-FILTER -s 203.0.113.5/32 -j DROP\nCOMMIT\n"
    )
    families = opened(tool_backend)
    assert not families.apply(diff(families.read(), rules(NodePlan(), IpvsSettings())))
    families.close()
    tables = [part for part in tool.save().split("*") if "KUBE-IPVS-OUT-FILTER" in part]
    assert [part.split()[0] for part in tables] == ["mangle"]


@pytest.mark.usefixtures("_nowhere")
@pytest.mark.parametrize("tool_backend", ToolBackend)
@pytest.mark.parametrize("of", Family)
def test_source_ranges_apply_to_host_originated_connections(tool_backend: ToolBackend, of: Family) -> None:
    """Without IPVS: a server on the node listens at the load balancer's address."""
    vip, own = {Family.IPV4: ("203.0.113.5", "192.0.2.1"), Family.IPV6: ("2001:db8::5", "2001:db8:1::1")}[of]
    for each in Family:
        create_all(each)
    add_addresses(vip, own)
    families = opened(tool_backend)
    assert not families.apply(diff(families.read(), rules(NodePlan(), IpvsSettings())))

    def connects(source: str = "", patience: float = sockets.ANSWERED) -> bool:
        bound = (source, 0) if source else None
        with contextlib.suppress(TimeoutError), socket.create_connection((vip, 80), patience, bound):
            return True
        return False

    def put(base: str, text: str) -> None:
        assert not sets.change([Member(of, set_name(base, of), text)], ())

    sets = IpSets()
    sets.read(Family)
    where = socket.AF_INET if of is Family.IPV4 else socket.AF_INET6
    with socket.create_server((vip, 80), family=where):
        assert connects()
        put(LOAD_BALANCER_FW, f"{vip},tcp:80")
        assert not connects(patience=0.2)
        assert not connects(own, patience=0.2)
        put(LOAD_BALANCER_SOURCE_CIDR, f"{vip},tcp:80,{own}")
        assert not connects(patience=0.2)
        assert connects(own)
        put(LOAD_BALANCER_SOURCE_IP, f"{vip},tcp:80,{vip}")
        assert connects()
    families.close()


@pytest.mark.usefixtures("_nowhere")
@pytest.mark.parametrize("tool_backend", ToolBackend)
def test_after_a_roll_back_nothing_is_left_that_kube_proxy_does_not_use(tool_backend: ToolBackend) -> None:
    for of in Family:
        create_all(of)
    families = opened(tool_backend)
    assert not families.apply(diff(families.read(), rules(NodePlan(), IpvsSettings())))
    families.close()
    tools = [iptables.find(of, tool_backend) for of in Family]
    before = [chains_of(tool.save()) for tool in tools]
    assert cleanup.remove_beside_kube_proxy(dry_run=True)
    assert [chains_of(tool.save()) for tool in tools] == before
    for tool in tools:  # kube-proxy writes its chains again, without rules that match the agent's sets
        tool.restore("*filter\n:KUBE-IPVS-FILTER - [0:0]\nCOMMIT\n*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
    assert cleanup.remove_beside_kube_proxy()
    assert cleanup.remove_beside_kube_proxy() == []
    for tool in tools:
        saved = tool.save()
        assert "KUBE-IPVS-POSTROUTING" not in saved
        assert "KUBE-IPVS-OUT-FILTER" not in saved
        assert (
            '-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING' in saved
        )
    own = {set_name(base, of) for base in OWN_SETS for of in Family}
    assert set(ipset.elements()) == NAMES.keys() - own


@pytest.mark.usefixtures("_nowhere")
def test_all_sets_are_created_and_read_back_and_foreign_sets_kept() -> None:
    assert not ipset.change([ipset.creation(IpSet("foreign", "hash:ip", Family.IPV4))])
    for of in Family:
        create_all(of)
    sets = IpSets()
    assert {key.name for key in sets.read(Family)} == set(NAMES)  # type: ignore[union-attr]
    assert cleanup.remove(()) == [f"ipsets: {len(NAMES)}"]
    assert set(ipset.elements()) == {"foreign"}
    assert cleanup.remove(()) == []


@pytest.mark.parametrize("tool_backend", ToolBackend)
def test_modes_iptables_and_ipvs_reuse_each_others_common_chains(tool_backend: ToolBackend) -> None:
    """The cleanup of each mode removes only its own remaining chains, in either order."""
    with empty_node(tool_backend) as testbed:
        served = testbed.wanted(
            testbed.plans(service("web", ips=("10.96.1.1",)), endpoints("web", "10.1.1.1"))
        )
        assert not testbed.bring(served)
        for of in Family:
            create_all(of)
        wanted = rules(NodePlan(), IpvsSettings())
        families = opened(tool_backend)
        assert not families.apply(diff(families.read(), wanted))
        assert removal_of_iptables.remove()
        assert families.read() == wanted
        assert "KUBE-SVC" not in testbed.iptables("-t nat -S")
        assert not testbed.bring(served)
        assert cleanup.remove(())
        assert testbed.plane.read() == served
        families.close()
        assert "KUBE-IPVS" not in iptables.find(Family.IPV4, tool_backend).save()
