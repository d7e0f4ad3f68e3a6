"""Defines which chains and rules belong to mode ipvs. Pure."""

from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.cleanup import COMMON_CHAINS
from ebpfproxy.backends.xtables.entries import FILTER, MANGLE, NAT
from ebpfproxy.backends.xtables.layout import Layout

OWN_CHAINS = frozenset(
    {
        (NAT, names.LOAD_BALANCER),
        (NAT, names.NODE_PORT),
        (NAT, names.IPVS_POSTROUTING),
        (FILTER, names.NODE_PORT),
        (FILTER, names.SOURCE_RANGES_FIREWALL),
        (FILTER, names.IPVS_FILTER),
        (FILTER, names.IPVS_OUT_FILTER),  # kube-proxy's
        (MANGLE, names.IPVS_OUT_FILTER),
    }
)
"""Table and name of the chains that no other mode has."""

LAYOUT = Layout(
    shared=frozenset(),
    exclusive=OWN_CHAINS | COMMON_CHAINS,
    jump_targets={
        NAT: (names.SERVICES, names.POSTROUTING, names.IPVS_POSTROUTING),
        FILTER: (
            names.FORWARD,
            names.NODE_PORT,
            names.PROXY_FIREWALL,
            names.IPVS_FILTER,
            names.IPVS_OUT_FILTER,
        ),
        MANGLE: (names.IPVS_OUT_FILTER,),
    },
)
"""Jumps are prepended as in kube-proxy, so the last one of a built-in chain ends up first."""
