"""Defines which chains and rules belong to mode ipvs. Pure."""

from ebpfproxy.backends.iptables import chains
from ebpfproxy.backends.iptables.cleanup import COMMON_CHAINS
from ebpfproxy.backends.iptables.entries import FILTER, MANGLE, NAT, Layout

OWN_CHAINS = frozenset(
    {
        (NAT, chains.LOAD_BALANCER),
        (NAT, chains.NODE_PORT),
        (NAT, chains.IPVS_POSTROUTING),
        (FILTER, chains.NODE_PORT),
        (FILTER, chains.SOURCE_RANGES_FIREWALL),
        (FILTER, chains.IPVS_FILTER),
        (FILTER, chains.IPVS_OUT_FILTER),  # kube-proxy's
        (MANGLE, chains.IPVS_OUT_FILTER),
    }
)
"""Table and name of the chains that no other mode has."""

LAYOUT = Layout(
    shared=frozenset(),
    exclusive=OWN_CHAINS | COMMON_CHAINS,
    jump_targets={
        NAT: (chains.SERVICES, chains.POSTROUTING, chains.IPVS_POSTROUTING),
        FILTER: (
            chains.FORWARD,
            chains.NODE_PORT,
            chains.PROXY_FIREWALL,
            chains.IPVS_FILTER,
            chains.IPVS_OUT_FILTER,
        ),
        MANGLE: (chains.IPVS_OUT_FILTER,),
    },
)
"""Jumps are prepended as in kube-proxy, so the last one of a built-in chain ends up first."""
