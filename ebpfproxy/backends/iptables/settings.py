"""The settings of the iptables backend."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class IptablesSettings:
    """`masquerade_bit`: which bit of the packet mark says that the packet is to be masqueraded, 0 to 31.

    `random_fully`: source ports of what is masqueraded are random (needs iptables 1.6.2, as MASQUERADE
    has no such option before). `tcp_be_liberal`: the sysctl nf_conntrack_tcp_be_liberal is on, so nothing
    that conntrack calls INVALID is dropped. Both are found out, not chosen.

    Whether NodePorts answer on loopback is no setting: the plan of the node says so.
    """

    masquerade_bit: int = 14
    random_fully: bool = True
    tcp_be_liberal: bool = False

    @property
    def masquerade_mark(self) -> int:
        return 1 << self.masquerade_bit
