"""The settings of the IPVS backend."""

import dataclasses

from ebpfproxy.model.address import Network

DEFAULT_SCHEDULER = "rr"


@dataclasses.dataclass(frozen=True, slots=True)
class IpvsSettings:
    """`scheduler`: one that the kernel has (rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh, …).

    `exclude_cidrs`: virtual servers there are another program's, unless a Service has the very same.

    `masquerade_all`: also what pods send to ClusterIPs. `masquerade_bit`: which bit of the packet mark says
    that the packet is to be masqueraded, 0 to 31.

    `strict_arp`: the node answers ARP for an address only on the device that has it, and so not for those of
    Services. Timeouts of IPVS's own table in whole seconds, 0 leaves one as it is: connections, those that
    have ended, and UDP flows.
    """

    scheduler: str = DEFAULT_SCHEDULER
    exclude_cidrs: tuple[Network, ...] = ()
    masquerade_all: bool = False
    masquerade_bit: int = 14
    strict_arp: bool = False
    tcp_timeout: int = 0
    tcp_fin_timeout: int = 0
    udp_timeout: int = 0

    @property
    def masquerade_mark(self) -> int:
        return 1 << self.masquerade_bit
