"""The parts of `Config` that apply to some modes only: `EbpfOptions`, `NetfilterOptions` and `IpvsOptions`.

A KubeProxyConfiguration has no fields for the options of mode ebpf, because they are ebpfproxy's own. All
others are kube-proxy's, except --iptables-backend.
"""

# ruff: noqa: RUF009 -- option() makes a dataclasses.field(), which is what a default may be made by

import dataclasses
from pathlib import Path

from ebpfproxy.config import flag_types
from ebpfproxy.config.option import Group, option
from ebpfproxy.model.address import Network
from ebpfproxy.model.balancing import EbpfForwarding, Forwarding
from ebpfproxy.plan.service_plan import DetectLocal, SocketLb

_EBPF, _NETFILTER, _IPVS, _USERSPACE = Group.EBPF, Group.NETFILTER, Group.IPVS, Group.USERSPACE

POD_INTERFACES = {
    DetectLocal.BRIDGE_INTERFACE: "pod_bridge_interface",
    DetectLocal.INTERFACE_NAME_PREFIX: "pod_interface_name_prefix",
}
"""The option that names the pod device, by the local traffic detection that needs it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetfilterOptions:
    """Options of modes nftables, iptables and ipvs."""

    detect_local_mode: DetectLocal = option(
        "--detect-local-mode", flag_types.DETECT_LOCAL, "ClusterCIDR", _NETFILTER,
        "How to detect local traffic. ClusterCIDR: by --cluster-cidr. NodeCIDR: by the podCIDRs of this "
        "node's Node object. BridgeInterface and InterfaceNamePrefix: by the device that packets arrive on. "
        "Mode ebpf does not use it.",
        fields="detectLocalMode",
    )  # fmt: skip
    cluster_cidr: tuple[Network, ...] = option(
        "--cluster-cidr", flag_types.CLUSTER_CIDRS, "", _NETFILTER,
        "CIDR of the cluster's pods, or one CIDR per family, separated by a comma. Empty: "
        "--detect-local-mode=ClusterCIDR treats no traffic as local.",
        fields="clusterCIDR",
    )  # fmt: skip
    pod_bridge_interface: str = option(
        "--pod-bridge-interface", flag_types.DEVICE_NAME, "", _NETFILTER,
        "Bridge that the pods are attached to. Required for --detect-local-mode=BridgeInterface, otherwise "
        "not used.",
        fields="detectLocal.bridgeInterface",
    )  # fmt: skip
    pod_interface_name_prefix: str = option(
        "--pod-interface-name-prefix", flag_types.DEVICE_NAME, "", _NETFILTER,
        "Prefix of the names of pod devices. Required for --detect-local-mode=InterfaceNamePrefix, otherwise "
        "not used.",
        fields="detectLocal.interfaceNamePrefix",
    )  # fmt: skip
    iptables_masquerade_bit: int = option(
        "--iptables-masquerade-bit", flag_types.integer(0, 31), "14", _NETFILTER,
        "Bit of the packet mark, 0 to 31, that marks packets to masquerade.",
        fields="iptables.masqueradeBit nftables.masqueradeBit",
    )  # fmt: skip
    iptables_backend: str = option(
        "--iptables-flavour --iptables-backend", flag_types.one_of("auto", "legacy", "nft"), "auto",
        _NETFILTER,
        "iptables backend for modes iptables and ipvs (ebpfproxy only). auto: the backend that holds this "
        "node's rules. --iptables-flavour is the previous name of this flag.",
    )  # fmt: skip
    iptables_min_sync_period: float = option(
        "--iptables-min-sync-period", flag_types.duration(zero=True), "1s", _NETFILTER,
        "Shortest time between two syncs in modes nftables and iptables. 0: no minimum. The longer of this "
        "and --min-sync-period applies.",
        fields="iptables.minSyncPeriod nftables.minSyncPeriod", zero_is_unset=True,
    )  # fmt: skip
    nftables_flowtable_devices: tuple[str, ...] = option(
        "--nftables-flowtable-devices", flag_types.DEVICE_PATTERNS, "", _NETFILTER,
        "Forward established flows of Services by a flowtable, at network devices with these names or "
        "patterns, such as eth*,veth* (mode nftables, ebpfproxy only). Such packets pass no rules of other "
        "programs and no conntrack. May be repeated. none or empty: no flowtable.",
    )  # fmt: skip
    conntrack_max_per_core: int = option(
        "--conntrack-max-per-core", flag_types.COUNT, "32768", _NETFILTER,
        "Maximum number of tracked connections per CPU. 0: keep the kernel's limit, whatever --conntrack-min "
        "is.",
        fields="conntrack.maxPerCore",
    )  # fmt: skip
    conntrack_min: int = option(
        "--conntrack-min", flag_types.COUNT, "131072", _NETFILTER,
        "Lower bound of the limit of tracked connections, for nodes with few CPUs. 0: no lower bound.",
        fields="conntrack.min",
    )  # fmt: skip
    conntrack_tcp_be_liberal: bool = option(
        "--conntrack-tcp-be-liberal", flag_types.BOOLEAN, "false", _NETFILTER,
        "Track TCP packets outside the window instead of marking them invalid.",
        fields="conntrack.tcpBeLiberal",
    )  # fmt: skip

    @property
    def pod_interface(self) -> str:
        """The name, or name prefix, of the pod device; "" if local traffic detection needs none."""
        name = POD_INTERFACES.get(self.detect_local_mode)
        return str(getattr(self, name)) if name else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IpvsOptions:
    """Options of mode ipvs only."""

    ipvs_scheduler: str = option(
        "--ipvs-scheduler", flag_types.TEXT, "", _IPVS,
        "IPVS scheduler: rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh or another one of the kernel. "
        "Empty: rr.",
        fields="ipvs.scheduler",
    )  # fmt: skip
    ipvs_forwarding: str = option(
        "--ipvs-forwarding", flag_types.one_of(*(each.value for each in Forwarding)), "nat", _IPVS,
        "How packets to external and load balancer IPs reach endpoints (ebpfproxy only). nat: translated. "
        "direct-routing: with the destination unchanged, to the endpoint's MAC address. tunnel: in an IP "
        "tunnel. With the last two, the endpoint replies to the client directly.",
    )  # fmt: skip
    ipvs_service_forwarding: bool = option(
        "--ipvs-service-forwarding", flag_types.BOOLEAN, "false", _IPVS,
        "Let the annotation ebpfproxy/ipvs-forwarding of a Service take precedence over --ipvs-forwarding "
        "(ebpfproxy only). Methods other than nat change sysctls of all nodes with endpoints "
        "(accept_local, rp_filter) and devices of their pods, so users who write Services change them then.",
    )  # fmt: skip
    ipvs_exclude_cidrs: tuple[Network, ...] = option(
        "--ipvs-exclude-cidrs", flag_types.NETWORKS, "", _IPVS,
        "Do not remove virtual servers in these networks, unless a Service has the address. May be "
        "repeated. Empty: no networks.",
        fields="ipvs.excludeCIDRs",
    )  # fmt: skip
    ipvs_strict_arp: bool = option(
        "--ipvs-strict-arp", flag_types.BOOLEAN, "false", _IPVS,
        "Answer ARP for an address only on the device that has it (sysctls arp_ignore 1, arp_announce 2). "
        "MetalLB needs this.",
        fields="ipvs.strictARP",
    )  # fmt: skip
    ipvs_min_sync_period: float = option(
        "--ipvs-min-sync-period", flag_types.duration(zero=True), "0s", _IPVS,
        "Shortest time between two syncs in mode ipvs. 0: no minimum. The longer of this and "
        "--min-sync-period applies.",
        fields="ipvs.minSyncPeriod",
    )  # fmt: skip
    ipvs_tcp_timeout: int = option(
        "--ipvs-tcp-timeout", flag_types.TIMEOUT, "0s", _IPVS,
        "Idle timeout of a TCP connection in IPVS. 0: keep the kernel's value.",
        fields="ipvs.tcpTimeout",
    )  # fmt: skip
    ipvs_tcpfin_timeout: int = option(
        "--ipvs-tcpfin-timeout", flag_types.TIMEOUT, "0s", _IPVS,
        "Timeout of a TCP connection in IPVS after a FIN. 0: keep the kernel's value.",
        fields="ipvs.tcpFinTimeout",
    )  # fmt: skip
    ipvs_udp_timeout: int = option(
        "--ipvs-udp-timeout", flag_types.TIMEOUT, "0s", _IPVS,
        "Idle timeout of a UDP flow in IPVS. 0: keep the kernel's value.",
        fields="ipvs.udpTimeout",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserspaceOptions:
    """Options of mode userspace only."""

    udp_timeout: float = option(
        "--udp-timeout", flag_types.duration(zero=False), "250ms", _USERSPACE,
        "Idle timeout of a UDP flow whose last datagram was a reply. A flow that waits for a reply has "
        "--conntrack-udp-timeout instead, if that is longer. Must be more than 0.",
        fields="udpIdleTimeout", zero_is_unset=True,
    )  # fmt: skip
    userspace_relays: int = option(
        "--userspace-relays", flag_types.integer(0, 1024), "0", _USERSPACE,
        "Number of processes that relay connections (ebpfproxy only). 0: one for each CPU that the agent may "
        "use.",
    )  # fmt: skip
    userspace_udp_flows_max: int = option(
        "--userspace-udp-flows-max", flag_types.ENTRIES, "65536", _USERSPACE,
        "Maximum number of UDP flows in each relay process (ebpfproxy only). Beyond it, the least recently "
        "active flow ends.",
    )  # fmt: skip
    userspace_affinity_max: int = option(
        "--userspace-affinity-max", flag_types.ENTRIES, "65536", _USERSPACE,
        "Maximum number of clients with session affinity in each relay process (ebpfproxy only). Beyond it, "
        "the least recently active client loses its affinity.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EbpfOptions:
    """Options of mode ebpf."""

    cgroup_root: Path | None = option(
        "--cgroup-root", flag_types.OPTIONAL_DIRECTORY, "", _EBPF,
        "The host's cgroup v2 root, to which the socket programs are attached. Empty: detect it.",
    )  # fmt: skip
    bpffs_root: Path = option(
        "--bpffs-root", flag_types.ABSOLUTE_PATH, "/sys/fs/bpf/ebpfproxy", _EBPF,
        "Directory on a bpffs for pinned programs, maps and links.",
    )  # fmt: skip
    proc_root: Path = option(
        "--proc-root", flag_types.ABSOLUTE_PATH, "/proc", _EBPF,
        "The host's proc file system, used to find the network namespaces of pods.",
    )  # fmt: skip
    socket_lb: SocketLb = option(
        "--socket-lb", flag_types.SOCKET_LB, "on", _EBPF,
        "Sockets that are redirected to an endpoint at connect(), which costs nothing per packet. on: "
        "sockets of pods and of the host. host: sockets of the host only. off: no socket load balancing. "
        "Other connections are translated packet by packet. All values are functionally equivalent. A "
        "service mesh whose sidecars must see the Service's address needs host or off.",
    )  # fmt: skip
    socket_lb_annotations: bool = option(
        "--socket-lb-annotations", flag_types.BOOLEAN, "false", _EBPF,
        "Translate the packets of pods that have the annotation ebpfproxy/socket-lb: off, or whose Namespace "
        "has it, instead of redirecting their sockets. The account needs list and watch for pods and "
        "namespaces.",
    )  # fmt: skip
    tc_devices: tuple[str, ...] = option(
        "--tc-devices", flag_types.DEVICE_PATTERNS, "", _EBPF,
        "Translate packets only on network devices with these names or patterns, such as eth*, and on "
        "loopback. May be repeated. none: on no device, so that another agent can use those of this "
        "network namespace. Empty: detected uplinks and tunnels, and pod devices where necessary.",
    )  # fmt: skip
    ebpf_stale_udp: str = option(
        "--ebpf-stale-udp", flag_types.one_of("reconnect", "destroy"), "reconnect", _EBPF,
        "What to do with a connected UDP socket whose endpoint was removed. reconnect: connect it to another "
        "endpoint without an error for its process (needs CAP_SYS_PTRACE and Linux 5.6); if that fails, "
        "translate the packets of a pod's socket. destroy: the same, but destroy sockets for which both "
        "fail; their process gets ECONNABORTED and must connect again.",
    )  # fmt: skip
    ebpf_redirect: bool = option(
        "--ebpf-redirect", flag_types.BOOLEAN, "false", _EBPF,
        "Forward flows of outside clients past this node's network stack. This is faster, but FORWARD rules, "
        "network policies by iptables or nftables, and conntrack do not see these flows.",
    )  # fmt: skip
    ebpf_xdp: str = option(
        "--ebpf-xdp", flag_types.one_of("off", "native", "generic"), "off", _EBPF,
        "Forward packets of established flows between outside clients and endpoints on other nodes by XDP, "
        "before the network stack. native: in the driver of the uplink. generic: for any driver, at less "
        "gain. A device with another XDP program works without XDP. Needs --ebpf-redirect.",
    )  # fmt: skip
    ebpf_forwarding: EbpfForwarding = option(
        "--ebpf-forwarding", flag_types.EBPF_FORWARDING, "snat", _EBPF,
        "How packets of outside clients reach endpoints on other nodes. snat: translated, so that replies "
        "return through this node. dsr: unchanged, in a tunnel; the endpoint's node replies to the client "
        "directly, and the endpoint sees the client's address. dsr needs --ebpf-dsr-port. The annotation "
        "ebpfproxy/ebpf-forwarding of a Service takes precedence.",
    )  # fmt: skip
    ebpf_dsr_port: int = option(
        "--ebpf-dsr-port", flag_types.PORT, "0", _EBPF,
        "UDP port of the tunnels (Geneve) of direct server return, such as 6083; the same on all nodes. This "
        "node then accepts tunneled packets, and announces it with an annotation of its Node object. The "
        "account needs the verb patch for nodes. 0: no direct server return.",
    )  # fmt: skip
    ebpf_dsr_sources: tuple[Network, ...] = option(
        "--ebpf-dsr-sources", flag_types.NETWORKS, "", _EBPF,
        "Accept tunneled packets from these networks, too. Those of the InternalIPs of all Nodes are always "
        "accepted. May be repeated. Empty: from no others.",
    )  # fmt: skip
    ebpf_flows_max: int = option(
        "--ebpf-flows-max", flag_types.ENTRIES_OR_ZERO, "0", _EBPF,
        "Maximum number of established flows that are translated packet by packet. In addition, an eighth "
        "as many flows, at least 4096, can be half-open. 0: one for each 32 KiB of memory, rounded down to a "
        "power of two, 65536 to 262144.",
    )  # fmt: skip
    ebpf_source_ranges_max: int = option(
        "--ebpf-source-ranges-max", flag_types.ENTRIES, "1048576", _EBPF,
        "Maximum number of load balancer source ranges of all ServicePorts together.",
    )  # fmt: skip
    ebpf_services_max: int = option(
        "--ebpf-services-max", flag_types.ENTRIES_OR_ZERO, "0", _EBPF,
        "Maximum number of frontends. Each address, port and protocol of a Service is a frontend. 0: one for "
        "each 64 KiB of memory, rounded down to a power of two, 65536 to 262144.",
    )  # fmt: skip
    ebpf_slots_max: int = option(
        "--ebpf-slots-max", flag_types.ENTRIES_OR_ZERO, "0", _EBPF,
        "Maximum number of endpoint slots. Each endpoint of each ServicePort needs one, or as many as its "
        "weight. Each list of source-hash or maglev needs 2039 to 65521. 0: one for each 16 KiB of memory, "
        "rounded down to a power of two, 524288 to 2097152.",
    )  # fmt: skip
    ebpf_endpoints_max: int = option(
        "--ebpf-endpoints-max", flag_types.ENTRIES_OR_ZERO, "0", _EBPF,
        "Maximum number of distinct endpoints. 0: one for each 64 KiB of memory, rounded down to a power of "
        "two, 262144 to 1048576.",
    )  # fmt: skip
    ebpf_affinity_max: int = option(
        "--ebpf-affinity-max", flag_types.ENTRIES, "65536", _EBPF,
        "Maximum number of clients with session affinity. Beyond it, the least recently active client loses "
        "its affinity.",
    )  # fmt: skip
    ebpf_sockets_max: int = option(
        "--ebpf-sockets-max", flag_types.ENTRIES_OR_ZERO, "0", _EBPF,
        "Maximum number of sockets connected to a Service, per socket map. 0: one for each 256 KiB of "
        "memory, rounded down to a power of two, at most 262144.",
    )  # fmt: skip
    ebpf_traffic_max: int = option(
        "--ebpf-traffic-max", flag_types.COUNT, "0", _EBPF,
        "Maximum number of ServicePorts whose packets, bytes and new flows in the packet path are counted "
        "separately, for metrics. Each takes 40 bytes per CPU, and five series. The others are counted "
        "together, as other. 0: all are counted together.",
    )  # fmt: skip
