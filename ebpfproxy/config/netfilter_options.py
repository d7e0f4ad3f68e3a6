"""The options that concern the modes nftables, iptables and ipvs alone: kube-proxy's, and the flavour."""

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
        "How packets of pods are told from others: by --cluster-cidr, by podCIDRs of this node, or by the "
        "device that they come in by. The mode ebpf knows by itself.",
        fields="detectLocalMode",
    )  # fmt: skip
    cluster_cidr: tuple[Network, ...] = option(
        "--cluster-cidr", flag_types.CLUSTER_CIDRS, "", _NETFILTER,
        "The addresses of the cluster's pods: one CIDR, or one of each family, separated by a comma. Without "
        "it the mode ClusterCIDR takes nobody for a pod.",
        fields="clusterCIDR",
    )  # fmt: skip
    pod_bridge_interface: str = option(
        "--pod-bridge-interface", flag_types.DEVICE_NAME, "", _NETFILTER,
        "The bridge that pods are behind, for --detect-local-mode=BridgeInterface.",
        fields="detectLocal.bridgeInterface",
    )  # fmt: skip
    pod_interface_name_prefix: str = option(
        "--pod-interface-name-prefix", flag_types.DEVICE_NAME, "", _NETFILTER,
        "How the names of pods' devices begin, for --detect-local-mode=InterfaceNamePrefix.",
        fields="detectLocal.interfaceNamePrefix",
    )  # fmt: skip
    iptables_masquerade_bit: int = option(
        "--iptables-masquerade-bit", flag_types.integer(0, 31), "14", _NETFILTER,
        "The bit of the packet mark that stands for a packet to masquerade, in these modes.",
        fields="iptables.masqueradeBit nftables.masqueradeBit",
    )  # fmt: skip
    iptables_flavour: str = option(
        "--iptables-flavour", flag_types.one_of("auto", "legacy", "nft"), "auto", _NETFILTER,
        "Which iptables the modes iptables and ipvs use; auto takes the one that this node's rules are in "
        "(ebpfproxy's own).",
    )  # fmt: skip
    iptables_min_sync_period: float = option(
        "--iptables-min-sync-period", flag_types.duration(zero=True), "1s", _NETFILTER,
        "The least time between two syncs in the modes nftables and iptables; --min-sync-period counts where "
        "it is longer.",
        fields="iptables.minSyncPeriod nftables.minSyncPeriod", zero_is_unset=True,
    )  # fmt: skip
    conntrack_max_per_core: int = option(
        "--conntrack-max-per-core", flag_types.COUNT, "32768", _NETFILTER,
        "Connections that the kernel shall be able to track, for each CPU; 0 leaves its limit alone.",
        fields="conntrack.maxPerCore",
    )  # fmt: skip
    conntrack_min: int = option(
        "--conntrack-min", flag_types.COUNT, "131072", _NETFILTER,
        "Connections that the kernel shall be able to track at least, however few CPUs there are.",
        fields="conntrack.min",
    )  # fmt: skip
    conntrack_tcp_be_liberal: bool = option(
        "--conntrack-tcp-be-liberal", flag_types.BOOLEAN, "false", _NETFILTER,
        "Let the kernel track TCP packets outside of the window, rather than call them invalid.",
        fields="conntrack.tcpBeLiberal",
    )  # fmt: skip

    @property
    def pod_interface(self) -> str:
        """The device that pods are told by, or how its name begins; "" where none is needed."""
        name = POD_INTERFACES.get(self.detect_local_mode)
        return str(getattr(self, name)) if name else ""
