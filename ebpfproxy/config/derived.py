"""What plan and the eBPF dataplane are told of the configuration, in their own words."""

from pathlib import Path

from ebpfproxy.config.settings import Config
from ebpfproxy.dataplanes.ebpf.dataplane import EbpfSettings, FlowTimeouts
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.plan.devices import NO_DEVICES
from ebpfproxy.plan.service_plan import PlanContext


def plan_context(config: Config) -> PlanContext:
    """Raises ConfigError where the node has no name."""
    return PlanContext(
        node_name=config.node_name,
        masquerade_all=config.masquerade_all,
        localhost_node_ports=config.iptables_localhost_nodeports,
        node_port_cidrs=config.node_port_cidrs,
        node_port_primary=config.node_port_primary,
        socket_lb=config.socket_lb,
        device_patterns=config.tc_devices,
    )


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
