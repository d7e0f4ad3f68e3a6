"""Every option reaches the part that it is for."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.backends.connection_resets import Pace
from ebpfproxy.backends.ebpf.backend import EbpfSettings, FlowTimeouts
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.ebpf.mode import ebpf_settings
from ebpfproxy.backends.iptables.mode import iptables_settings
from ebpfproxy.backends.iptables.rules import IptablesSettings
from ebpfproxy.backends.ipvs.entries import IpvsSettings
from ebpfproxy.backends.ipvs.mode import ipvs_settings
from ebpfproxy.backends.netfilter.nat_backend import netfilter_settings
from ebpfproxy.backends.netfilter.sysctls import NetfilterSettings
from ebpfproxy.backends.nftables.mode import nftables_settings
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.config import Config
from ebpfproxy.config.derived import least_interval, plan_context
from ebpfproxy.model.address import Family, parse_address
from ebpfproxy.model.balancing import Forwarding
from ebpfproxy.plan.service_plan import DetectLocal, PlanContext, Protection, SocketLb
from tests.support.build import networks

CGROUP = Path("/sys/fs/cgroup")


def settings(**texts: Any) -> EbpfSettings:
    return ebpf_settings(Config.parse(texts), CGROUP)


def test_without_flags_all_parts_have_their_defaults() -> None:
    found = settings(hostname_override="")
    assert found == EbpfSettings(CGROUP, Path("/sys/fs/bpf/ebpfproxy"), resets=Pace(node=found.resets.node))
    assert plan_context(Config.parse({"hostname_override": "here"}), "ebpf") == PlanContext("here")


@pytest.mark.parametrize(
    ("mode", "given", "wanted"),
    [
        ("userspace", "node", Protection.NODES),  # it would take all ports of the other Node's address
        ("userspace", "none", Protection.NONE),
        ("nftables", "node", Protection.NODE),
    ],
)
def test_relays_leave_addresses_of_other_nodes_to_them(mode: str, given: str, wanted: Protection) -> None:
    config = Config.parse({"hostname_override": "here", "protected_addresses": given})
    assert plan_context(config, mode).protection is wanted


@pytest.mark.parametrize(("text", "address"), [("0.0.0.0", None), ("::", None), ("192.0.2.9", "192.0.2.9")])
def test_a_specific_bind_address_becomes_the_primary_address(text: str, address: str | None) -> None:
    context = plan_context(Config.parse({"hostname_override": "here", "bind_address": text}), "ebpf")
    assert context.bind_address == (parse_address(address) if address else None)


def test_every_size_has_an_option() -> None:
    names = [field.name for field in dataclasses.fields(MapSizes)]
    names = names[: names.index("half_open")]
    texts = {f"ebpf_{name}_max": str(number) for number, name in enumerate(names, 1)}
    assert settings(**texts).sizes == MapSizes(*range(1, len(names) + 1))


def test_timeouts_are_those_of_the_flags() -> None:
    given = settings(
        conntrack_tcp_timeout_established="2h",
        conntrack_tcp_timeout_close_wait="10m",
        conntrack_udp_timeout="10s",
        conntrack_udp_timeout_stream="1500ms",
    )
    assert given.timeouts == FlowTimeouts(tcp_established=7200, tcp_close_wait=600, udp=10, udp_stream=2)


@pytest.mark.parametrize("which", ["tcp_timeout_established", "tcp_timeout_close_wait", "udp_timeout_stream"])
def test_a_timeout_of_0_is_the_usual_one(which: str) -> None:
    assert settings(**{f"conntrack_{which}": "0s"}).timeouts == FlowTimeouts()


def test_further_flags_of_the_packet_path_reach_the_backend() -> None:
    config = Config.parse(
        {
            "socket_lb": "host",
            "tc_devices": ("eth*,bond0", "wg0"),
            "ebpf_redirect": "true",
            "masquerade_all": "true",
            "nodeport_addresses": ("192.0.2.0/24",),
            "iptables_localhost_nodeports": "false",
            "feature_gates": ("AllowServiceExternalIPs=false",),
            "hostname_override": "here",
        }
    )
    assert plan_context(config, "ebpf") == PlanContext(
        "here",
        masquerade_all=True,
        localhost_node_ports=False,
        node_port_cidrs=networks(["192.0.2.0/24"]),
        external_ips=False,
        socket_lb=SocketLb.HOST,
        redirect=True,
        device_patterns=("eth*", "bond0", "wg0"),
    )
    assert not plan_context(config, "nftables").redirect
    given = ebpf_settings(config, CGROUP)
    assert (given.socket_lb, given.redirect) == (SocketLb.HOST, True)


def test_only_mode_nftables_has_a_flowtable() -> None:
    """--tc-devices has the word none, and so has this flag."""

    def patterns(mode: str, *texts: str) -> tuple[str, ...]:
        config = Config.parse({"nftables_flowtable_devices": texts, "hostname_override": "here"})
        return plan_context(config, mode).flowtable_patterns

    assert patterns("nftables", "eth*,veth*", "bond0") == ("eth*", "veth*", "bond0")
    assert patterns("nftables", "none") == patterns("nftables") == patterns("iptables", "eth*") == ()


def test_the_backend_has_devices_unless_tc_devices_is_none() -> None:
    assert settings(tc_devices=("eth0",)).devices
    assert not settings(tc_devices=("none",)).devices


NETFILTER = pytest.mark.parametrize("mode", ["nftables", "iptables"])


@NETFILTER
def test_netfilter_modes_detect_local_traffic_by_cluster_cidr_by_default(mode: str) -> None:
    config = Config.parse({"hostname_override": "here", "cluster_cidr": "10.244.0.0/16,fd00::/48"})
    assert plan_context(config, mode) == PlanContext(
        "here",
        detect_local=DetectLocal.CLUSTER_CIDR,
        cluster_cidrs=networks(["10.244.0.0/16", "fd00::/48"]),
    )


@NETFILTER
@pytest.mark.parametrize(
    ("detect", "flag", "interface"),
    [
        (DetectLocal.NODE_CIDR, {}, ""),
        (DetectLocal.BRIDGE_INTERFACE, {"pod_bridge_interface": "cbr0"}, "cbr0"),
        (DetectLocal.INTERFACE_NAME_PREFIX, {"pod_interface_name_prefix": "cali"}, "cali"),
    ],
)
def test_netfilter_modes_detect_local_traffic_as_flags_say(
    mode: str, detect: DetectLocal, flag: dict[str, str], interface: str
) -> None:
    config = Config.parse({"hostname_override": "here", "detect_local_mode": detect.value} | flag)
    assert plan_context(config, mode) == PlanContext("here", detect_local=detect, pod_interface=interface)


def test_mode_ebpf_detects_local_traffic_by_devices_whatever_the_flags() -> None:
    config = Config.parse({"detect_local_mode": "BridgeInterface", "pod_bridge_interface": "cbr0"})
    assert plan_context(config, "ebpf").detect_local is DetectLocal.DEVICES


@pytest.mark.parametrize(
    ("texts", "ebpf", "netfilter"),
    [
        ({}, 0.0, 1.0),
        ({"iptables_min_sync_period": "0s"}, 0.0, 0.0),
        ({"iptables_min_sync_period": "10s"}, 0.0, 10.0),
        ({"min_sync_period": "5s"}, 5.0, 5.0),
        ({"min_sync_period": "5s", "iptables_min_sync_period": "10s"}, 5.0, 10.0),
        ({"sync_period": "500ms"}, 0.0, 0.5),
    ],
)
def test_iptables_min_sync_period_applies_to_netfilter_modes(
    texts: dict[str, str], ebpf: float, netfilter: float
) -> None:
    config = Config.parse(texts)
    assert least_interval(config, "ebpf") == ebpf
    assert least_interval(config, "nftables") == least_interval(config, "iptables") == netfilter


def test_without_flags_netfilter_backends_have_their_defaults() -> None:
    assert iptables_settings(Config()) == IptablesSettings()
    assert nftables_settings(Config()) == NftablesSettings(localhost=frozenset(Family))
    assert netfilter_settings(Config(), "nftables") == NetfilterSettings()
    assert netfilter_settings(Config(), "iptables") == NetfilterSettings(route_localnet=True)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"nodeport_addresses": ("primary",)}, set()),
        ({"nodeport_addresses": ("primary", "localhost")}, set(Family)),
        ({"nodeport_addresses": ("127.0.0.1/32", "2001:db8::/64")}, {Family.IPV4}),
        ({"nodeport_addresses": ("127.0.0.2/32",)}, {Family.IPV6}),
        ({"iptables_localhost_nodeports": "false"}, set()),
    ],
)
def test_mode_nftables_serves_loopback_in_the_families_whose_loopback_accepts_node_ports(
    texts: dict[str, Any], expected: set[Family]
) -> None:
    config = Config.parse({"hostname_override": "here"} | texts)
    assert nftables_settings(config).localhost == expected


def test_mode_ipvs_never_answers_on_loopback_and_has_its_own_minimum_sync_period() -> None:
    config = Config.parse({"hostname_override": "here", "ipvs_min_sync_period": "2s"})
    assert plan_context(config, "ipvs").localhost_node_ports is False
    assert not netfilter_settings(config, "ipvs").route_localnet
    assert least_interval(config, "ipvs") == 2.0
    assert least_interval(Config(), "ipvs") == 0.0


def test_flags_of_ipvs_reach_its_backend() -> None:
    assert ipvs_settings(Config()) == IpvsSettings(scheduler="rr")
    texts = {
        "ipvs_scheduler": "sh",
        "ipvs_forwarding": "tunnel",
        "ipvs_exclude_cidrs": ("192.0.2.0/24",),
        "masquerade_all": "true",
        "iptables_masquerade_bit": "3",
        "ipvs_strict_arp": "true",
        "ipvs_tcp_timeout": "1s",
        "ipvs_tcpfin_timeout": "2s",
        "ipvs_udp_timeout": "3s",
    }
    assert ipvs_settings(Config.parse(texts)) == IpvsSettings(
        "sh", Forwarding.TUNNEL, tuple(networks(["192.0.2.0/24"])), True, 3, True, 1, 2, 3
    )


def test_the_masquerade_bit_is_for_both_modes_of_netfilter() -> None:
    config = Config.parse({"iptables_masquerade_bit": "3", "conntrack_tcp_be_liberal": "true"})
    assert iptables_settings(config) == IptablesSettings(masquerade_bit=3, tcp_be_liberal=True)
    assert nftables_settings(config).masquerade_mark == 8


def test_conntrack_flags_reach_the_sysctls() -> None:
    config = Config.parse(
        {
            "conntrack_max_per_core": "1",
            "conntrack_min": "2",
            "conntrack_tcp_timeout_established": "3s",
            "conntrack_tcp_timeout_close_wait": "4s",
            "conntrack_tcp_be_liberal": "true",
            "conntrack_udp_timeout": "5s",
            "conntrack_udp_timeout_stream": "6s",
        }
    )
    assert netfilter_settings(config, "nftables") == NetfilterSettings(1, 2, 3, 4, True, 5, 6)


@pytest.mark.parametrize(
    "texts", [{"iptables_localhost_nodeports": "false"}, {"nodeport_addresses": ("192.0.2.0/24",)}]
)
def test_route_localnet_is_off_if_no_node_port_answers_on_loopback(texts: dict[str, Any]) -> None:
    assert not netfilter_settings(Config.parse(texts), "iptables").route_localnet


def test_only_mode_ebpf_has_tunnels() -> None:
    config = Config.parse(
        {
            "ebpf_dsr_port": "6083",
            "ebpf_forwarding": "dsr",
            "ebpf_dsr_sources": ("192.0.2.0/24, 2001:db8::/64",),
            "hostname_override": "here",
        }
    )
    context = plan_context(config, "ebpf")
    assert (context.dsr_port, context.direct_return) == (6083, True)
    assert [str(each) for each in context.tunnel_sources] == ["192.0.2.0/24", "2001:db8::/64"]
    other = plan_context(config, "nftables")
    assert (other.dsr_port, other.direct_return) == (0, True)
