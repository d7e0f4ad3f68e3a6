"""Values that the planner and the agent derive from the configuration."""

from ebpfproxy.config.settings import Config
from ebpfproxy.model.address import is_unspecified
from ebpfproxy.model.balancing import EbpfForwarding, Forwarding
from ebpfproxy.model.service import RemovedEndpoints
from ebpfproxy.plan.devices import NO_DEVICES
from ebpfproxy.plan.service_plan import DetectLocal, PlanContext, Protection, Role

EBPF, IPVS, NFTABLES, USERSPACE = "ebpf", "ipvs", "nftables", "userspace"


def plan_context(config: Config, mode: str, sctp_unserved: str = "") -> PlanContext:
    """Return the planner's input. `mode` is the active mode; `sctp_unserved`: see `PlanContext`.

    Raises ConfigError if the node has no name.
    """
    return PlanContext(
        node_name="" if config.role is Role.EDGE else config.node_name,
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
        flowtable_patterns=flowtable_patterns(config) if mode == NFTABLES else (),
        algorithm=config.lb_algorithm,
        slow_start=config.slow_start,
        host_ports=config.host_ports,
        external_ips=config.allow_external_ips,
        sctp_unserved=sctp_unserved,
        role=config.role,
        vip_cidrs=config.edge_vip_cidrs,
        dsr_port=config.ebpf_dsr_port if mode == EBPF else 0,
        direct_return=config.ebpf_forwarding is EbpfForwarding.DSR,
        tunnel_sources=config.ebpf_dsr_sources,
        protection=_protection(config, mode),
        forwarding=Forwarding(config.ipvs_forwarding) if mode == IPVS else Forwarding.NAT,
        service_forwarding=config.ipvs_service_forwarding,
        external_networks=config.external_ip_cidrs,
        rebalance=config.rebalance,
        reset_removed=config.removed_endpoints == RemovedEndpoints.RESET.value,
    )


def flowtable_patterns(config: Config) -> tuple[str, ...]:
    """Return the patterns of the devices of the flowtable. Empty: there is no flowtable."""
    patterns = config.nftables_flowtable_devices
    return () if patterns == NO_DEVICES else patterns


def _protection(config: Config, mode: str) -> Protection:
    """Mode userspace makes addresses of Services local, so no other port of another Node could be reached."""
    if mode == USERSPACE and config.protected_addresses is Protection.NODE:
        return Protection.NODES
    return config.protected_addresses


def least_interval(config: Config, mode: str) -> float:
    """Return the shortest time between two syncs, in seconds; at most the sync period.

    Modes that start a process for each sync have a minimum of their own, as in kube-proxy.
    """
    minimums = {EBPF: 0.0, USERSPACE: 0.0, IPVS: config.ipvs_min_sync_period}
    mode_minimum = minimums.get(mode, config.iptables_min_sync_period)
    return min(max(config.min_sync_period, mode_minimum), config.sync_period)
