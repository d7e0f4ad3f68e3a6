"""The options that concern the mode ipvs alone: kube-proxy's."""

import dataclasses

from ebpfproxy.config import flag_types
from ebpfproxy.config.option import Group, option
from ebpfproxy.model.address import Network

_IPVS = Group.IPVS


@dataclasses.dataclass(frozen=True, kw_only=True)
class IpvsOptions:
    """A part of `Config`."""

    ipvs_scheduler: str = option(
        "--ipvs-scheduler", flag_types.TEXT, "", _IPVS,
        "IPVS scheduler: rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh or another one of the kernel. "
        "Default: rr.",
        fields="ipvs.scheduler",
    )  # fmt: skip
    ipvs_exclude_cidrs: tuple[Network, ...] = option(
        "--ipvs-exclude-cidrs", flag_types.NETWORKS, "", _IPVS,
        "Leave virtual servers in these networks alone, unless a Service has the address. May be "
        "repeated.",
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
        "Shortest time between two syncs in mode ipvs. The longer of this and --min-sync-period applies.",
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
