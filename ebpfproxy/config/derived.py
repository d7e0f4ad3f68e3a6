"""What plan and the dataplanes are told of the configuration, in their own words."""

from pathlib import Path

from ebpfproxy.config.settings import Config
from ebpfproxy.dataplanes.ebpf.dataplane import EbpfSettings, FlowTimeouts
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.dataplanes.iptables.settings import IptablesSettings
from ebpfproxy.dataplanes.ipvs.settings import DEFAULT_SCHEDULER, IpvsSettings
from ebpfproxy.dataplanes.netfilter_sysctls import NetfilterSettings, answers_on_loopback
from ebpfproxy.dataplanes.nftables.settings import NftablesSettings
from ebpfproxy.model.address import is_unspecified
from ebpfproxy.plan.devices import NO_DEVICES
from ebpfproxy.plan.service_plan import DetectLocal, PlanContext

EBPF, IPTABLES, IPVS = "ebpf", "iptables", "ipvs"


def plan_context(config: Config, mode: str) -> PlanContext:
    """`mode` is the one that serves. Raises ConfigError where the node has no name."""
    return PlanContext(
        node_name=config.node_name,
        masquerade_all=config.masquerade_all,
        localhost_node_ports=config.iptables_localhost_nodeports and mode != IPVS,
        node_port_cidrs=config.node_port_cidrs,
        node_port_primary=config.node_port_primary,
        bind_address=None if is_unspecified(config.bind_address) else config.bind_address,
        detect_local=DetectLocal.DEVICES if mode == EBPF else config.detect_local_mode,
        cluster_cidrs=config.cluster_cidr,
        pod_interface=config.pod_interface,
        socket_lb=config.socket_lb,
        redirect=config.ebpf_redirect and mode == EBPF,
        device_patterns=config.tc_devices,
    )


def least_interval(config: Config, mode: str) -> float:
    """The least time between two syncs, in seconds. What costs a process at each sync waits as kube-proxy's
    does; neither waits for longer than the period at which everything is verified.
    """
    own = {EBPF: 0.0, IPVS: config.ipvs_min_sync_period}.get(mode, config.iptables_min_sync_period)
    return min(max(config.min_sync_period, own), config.sync_period)


def ebpf_settings(config: Config, cgroup_root: Path) -> EbpfSettings:
    """`cgroup_root` is the one found, where `config` names none."""
    return EbpfSettings(
        cgroup_root=cgroup_root,
        bpffs_root=config.bpffs_root,
        proc_root=config.proc_root,
        sizes=_sizes(config),
        socket_lb=config.socket_lb,
        timeouts=_timeouts(config),
        redirect=config.ebpf_redirect,
        devices=config.tc_devices != NO_DEVICES,
        destroy_stale_sockets=config.ebpf_stale_udp == "destroy",
    )


def iptables_settings(config: Config) -> IptablesSettings:
    """What the configuration says; whether iptables can choose ports at random, and whether conntrack is
    liberal already, is for the caller to find out.
    """
    return IptablesSettings(
        masquerade_bit=config.iptables_masquerade_bit,
        tcp_be_liberal=config.conntrack_tcp_be_liberal,
    )


def nftables_settings(config: Config) -> NftablesSettings:
    return NftablesSettings(masquerade_bit=config.iptables_masquerade_bit)


def ipvs_settings(config: Config) -> IpvsSettings:
    return IpvsSettings(
        scheduler=config.ipvs_scheduler or DEFAULT_SCHEDULER,
        exclude_cidrs=config.ipvs_exclude_cidrs,
        masquerade_all=config.masquerade_all,
        masquerade_bit=config.iptables_masquerade_bit,
        strict_arp=config.ipvs_strict_arp,
        tcp_timeout=config.ipvs_tcp_timeout,
        tcp_fin_timeout=config.ipvs_tcpfin_timeout,
        udp_timeout=config.ipvs_udp_timeout,
    )


def netfilter_settings(config: Config, mode: str) -> NetfilterSettings:
    """`mode` is nftables, iptables or ipvs. Raises ConfigError where the node has no name."""
    return NetfilterSettings(
        max_per_core=config.conntrack_max_per_core,
        min_entries=config.conntrack_min,
        tcp_established=config.conntrack_tcp_timeout_established,
        tcp_close_wait=config.conntrack_tcp_timeout_close_wait,
        tcp_be_liberal=config.conntrack_tcp_be_liberal,
        udp=config.conntrack_udp_timeout,
        udp_stream=config.conntrack_udp_timeout_stream,
        route_localnet=mode == IPTABLES and answers_on_loopback(plan_context(config, mode)),
    )


def _sizes(config: Config) -> MapSizes:
    return MapSizes(
        services=config.ebpf_services_max,
        slots=config.ebpf_slots_max,
        endpoints=config.ebpf_endpoints_max,
        affinity=config.ebpf_affinity_max,
        sockets=config.ebpf_sockets_max,
        flows=config.ebpf_flows_max,
        source_ranges=config.ebpf_source_ranges_max,
    )


def _timeouts(config: Config) -> FlowTimeouts:
    """0 leaves a timeout as it is, which with kube-proxy means as the kernel has it."""
    usual = FlowTimeouts()
    return FlowTimeouts(
        tcp_established=config.conntrack_tcp_timeout_established or usual.tcp_established,
        tcp_close_wait=config.conntrack_tcp_timeout_close_wait or usual.tcp_close_wait,
        udp=config.conntrack_udp_timeout or usual.udp,
        udp_stream=config.conntrack_udp_timeout_stream or usual.udp_stream,
    )
