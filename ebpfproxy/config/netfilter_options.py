"""The options of modes nftables, iptables and ipvs: kube-proxy's, and the iptables backend."""

# ruff: noqa: RUF009 -- option() makes a dataclasses.field(), which is what a default may be made by

import dataclasses

from ebpfproxy.config import flag_types
from ebpfproxy.config.option import Group, option
from ebpfproxy.model.address import Network
from ebpfproxy.plan.service_plan import DetectLocal

_NETFILTER = Group.NETFILTER

POD_INTERFACES = {
    DetectLocal.BRIDGE_INTERFACE: "pod_bridge_interface",
    DetectLocal.INTERFACE_NAME_PREFIX: "pod_interface_name_prefix",
}
"""Which option names the device, by the modes of detection that need one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetfilterOptions:
    """A part of `Config`."""

    detect_local_mode: DetectLocal = option(
        "--detect-local-mode", flag_types.DETECT_LOCAL, "ClusterCIDR", _NETFILTER,
        "How to detect local traffic: by --cluster-cidr, by the podCIDRs of this node, or by the device "
        "that packets arrive on. Mode ebpf does not need it.",
        fields="detectLocalMode",
    )  # fmt: skip
    cluster_cidr: tuple[Network, ...] = option(
        "--cluster-cidr", flag_types.CLUSTER_CIDRS, "", _NETFILTER,
        "Addresses of the cluster's pods: one CIDR, or one per family, separated by a comma. If empty, "
        "--detect-local-mode=ClusterCIDR treats no traffic as local.",
        fields="clusterCIDR",
    )  # fmt: skip
    pod_bridge_interface: str = option(
        "--pod-bridge-interface", flag_types.DEVICE_NAME, "", _NETFILTER,
        "Bridge that pods are attached to, for --detect-local-mode=BridgeInterface.",
        fields="detectLocal.bridgeInterface",
    )  # fmt: skip
    pod_interface_name_prefix: str = option(
        "--pod-interface-name-prefix", flag_types.DEVICE_NAME, "", _NETFILTER,
        "Prefix of the names of pod devices, for --detect-local-mode=InterfaceNamePrefix.",
        fields="detectLocal.interfaceNamePrefix",
    )  # fmt: skip
    iptables_masquerade_bit: int = option(
        "--iptables-masquerade-bit", flag_types.integer(0, 31), "14", _NETFILTER,
        "Bit of the packet mark that marks packets to masquerade.",
        fields="iptables.masqueradeBit nftables.masqueradeBit",
    )  # fmt: skip
    iptables_backend: str = option(
        "--iptables-flavour --iptables-backend", flag_types.one_of("auto", "legacy", "nft"), "auto",
        _NETFILTER,
        "iptables backend for modes iptables and ipvs. auto: the one that holds this node's rules "
        "(ebpfproxy only). --iptables-flavour is its previous name.",
    )  # fmt: skip
    iptables_min_sync_period: float = option(
        "--iptables-min-sync-period", flag_types.duration(zero=True), "1s", _NETFILTER,
        "Shortest time between two syncs in modes nftables and iptables. The longer of this and --min- "
        "sync-period applies.",
        fields="iptables.minSyncPeriod nftables.minSyncPeriod", zero_is_unset=True,
    )  # fmt: skip
    conntrack_max_per_core: int = option(
        "--conntrack-max-per-core", flag_types.COUNT, "32768", _NETFILTER,
        "Maximum number of tracked connections per CPU. 0: keep the kernel's limit.",
        fields="conntrack.maxPerCore",
    )  # fmt: skip
    conntrack_min: int = option(
        "--conntrack-min", flag_types.COUNT, "131072", _NETFILTER,
        "Minimum of the limit of tracked connections, regardless of --conntrack-max-per-core.",
        fields="conntrack.min",
    )  # fmt: skip
    conntrack_tcp_be_liberal: bool = option(
        "--conntrack-tcp-be-liberal", flag_types.BOOLEAN, "false", _NETFILTER,
        "Track TCP packets outside the window instead of marking them invalid.",
        fields="conntrack.tcpBeLiberal",
    )  # fmt: skip

    @property
    def pod_interface(self) -> str:
        """The device that identifies pods, or how its name begins; "" where none is needed."""
        name = POD_INTERFACES.get(self.detect_local_mode)
        return str(getattr(self, name)) if name else ""
