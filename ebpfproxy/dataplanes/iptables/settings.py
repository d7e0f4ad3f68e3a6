"""What the iptables dataplane is told when it is made."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class IptablesSettings:
    """`masquerade_bit`: which bit of the packet mark says that the packet is to be masqueraded, 0 to 31.

    `random_fully`: source ports of what is masqueraded are random (needs iptables 1.6.2, as MASQUERADE
    has no such option before). `tcp_be_liberal`: the sysctl nf_conntrack_tcp_be_liberal is on, so nothing
    that conntrack calls INVALID is dropped. Both are found out, not chosen.

    `comments`: on the rules of KUBE-SVC, KUBE-SVL and KUBE-SEP chains. kube-proxy leaves them out once the
    cluster has more than 1000 endpoints, and so rewrites every rule of every Service when it comes to that
    number. Here what is written for a Service depends on that Service alone, so they are there at any
    size, unless somebody wants them gone: they are two fifths of the text.

    Whether NodePorts answer on loopback is no setting: the plan of the node says so.
    """

    masquerade_bit: int = 14
    random_fully: bool = True
    tcp_be_liberal: bool = False
    comments: bool = True

    @property
    def masquerade_mark(self) -> int:
        return 1 << self.masquerade_bit
