"""The settings of the iptables backend."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class IptablesSettings:
    """Settings of the iptables backend.

    - `masquerade_bit`: the bit of the packet mark that requests masquerading, 0 to 31.
    - `random_fully`: source ports of masqueraded connections are random. Requires iptables 1.6.2: MASQUERADE
      has no such option before. Detected, not configured.
    - `tcp_be_liberal`: the sysctl nf_conntrack_tcp_be_liberal is on, so packets that conntrack marks INVALID
      are not dropped. Configured or detected.
    - `localhost_node_ports`: NodePorts answer on 127.0.0.1, so that new connections to them are counted. The
      plan of the node defines which rules NodePorts have.
    - `counts_packets`: rules count packets with nfacct. Requires a kernel and tools with it. Detected.
    """

    masquerade_bit: int = 14
    random_fully: bool = True
    tcp_be_liberal: bool = False
    localhost_node_ports: bool = True
    counts_packets: bool = False

    @property
    def counts_localhost(self) -> bool:
        """Whether connections to NodePorts on 127.0.0.0/8 are counted."""
        return self.counts_packets and self.localhost_node_ports

    @property
    def masquerade_mark(self) -> int:
        return 1 << self.masquerade_bit
