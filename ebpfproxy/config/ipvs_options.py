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
        "How IPVS chooses endpoints: rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh or whatever the "
        "kernel has. Default: rr.",
        fields="ipvs.scheduler",
    )  # fmt: skip
    ipvs_exclude_cidrs: tuple[Network, ...] = option(
        "--ipvs-exclude-cidrs", flag_types.NETWORKS, "", _IPVS,
        "Virtual servers in these networks are somebody else's, but for those that a Service has. May be "
        "given more than once.",
        fields="ipvs.excludeCIDRs",
    )  # fmt: skip
    ipvs_strict_arp: bool = option(
        "--ipvs-strict-arp", flag_types.BOOLEAN, "false", _IPVS,
        "Answer ARP for an address only on the device that has it (arp_ignore 1, arp_announce 2), and so not "
        "for those of Services, as MetalLB needs it.",
        fields="ipvs.strictARP",
    )  # fmt: skip
    ipvs_min_sync_period: float = option(
        "--ipvs-min-sync-period", flag_types.duration(zero=True), "0s", _IPVS,
        "The least time between two syncs; --min-sync-period counts where it is longer.",
        fields="ipvs.minSyncPeriod",
    )  # fmt: skip
    ipvs_tcp_timeout: int = option(
        "--ipvs-tcp-timeout", flag_types.TIMEOUT, "0s", _IPVS,
        "For how long IPVS keeps a TCP connection that is idle (0: as the kernel has it).",
        fields="ipvs.tcpTimeout",
    )  # fmt: skip
    ipvs_tcpfin_timeout: int = option(
        "--ipvs-tcpfin-timeout", flag_types.TIMEOUT, "0s", _IPVS,
        "For how long IPVS keeps a TCP connection after a FIN (0: as the kernel has it).",
        fields="ipvs.tcpFinTimeout",
    )  # fmt: skip
    ipvs_udp_timeout: int = option(
        "--ipvs-udp-timeout", flag_types.TIMEOUT, "0s", _IPVS,
        "For how long IPVS keeps a UDP flow that is idle (0: as the kernel has it).",
        fields="ipvs.udpTimeout",
    )  # fmt: skip
