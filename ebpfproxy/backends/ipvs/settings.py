"""The settings of the IPVS backend."""

import dataclasses

from ebpfproxy.model.address import Network
from ebpfproxy.model.balancing import Forwarding

DEFAULT_SCHEDULER = "rr"


@dataclasses.dataclass(frozen=True, slots=True)
class IpvsSettings:
    """Settings of the IPVS backend.

    - `scheduler`: a scheduler that the kernel has (rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh, …),
      for Services that request no algorithm.
    - `forwarding`: for Services that request none.
    - `exclude_cidrs`: virtual servers in these networks belong to another program, unless a Service has the
      same frontend.
    - `masquerade_all`: also masquerade connections of pods to ClusterIPs.
    - `masquerade_bit`: the bit of the packet mark that requests masquerading, 0 to 31.
    - `strict_arp`: the node answers ARP for an address only on the device that has it, so not for addresses
      of Services.
    - Timeouts of IPVS in seconds, for TCP connections, closed TCP connections and UDP flows. 0 leaves one
      unchanged.
    """

    scheduler: str = DEFAULT_SCHEDULER
    forwarding: Forwarding = Forwarding.NAT
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
