"""Which chains the mode iptables has, and what in them is ours. Pure."""

from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.entries import FILTER, MANGLE, NAT
from ebpfproxy.backends.xtables.layout import Layout

SHARED_CHAINS = (
    (FILTER, names.EXTERNAL_SERVICES),
    (FILTER, names.NODE_PORTS),
    (FILTER, names.SERVICES),
    (FILTER, names.PROXY_FIREWALL),
    (FILTER, names.FIREWALL),
    (NAT, names.SERVICES),
    (NAT, names.NODE_PORTS),
)
"""Table and name of every shared chain."""

NODE_CHAINS = (
    (FILTER, names.FORWARD),
    (NAT, names.POSTROUTING),
    (NAT, names.MARK_MASQ),
    (MANGLE, names.CANARY),
    (NAT, names.CANARY),
    (FILTER, names.CANARY),
)
"""Table and name of every chain whose rules all come from the node."""

JUMP_TARGETS = {
    FILTER: (
        names.EXTERNAL_SERVICES,
        names.NODE_PORTS,
        names.SERVICES,
        names.FORWARD,
        names.PROXY_FIREWALL,
        names.FIREWALL,
    ),
    NAT: (names.SERVICES, names.POSTROUTING),
}
"""Which chains built-in ones jump to, by table, in the order in which kube-proxy prepends the jumps."""

LOCALNET_GUARD = (
    "! -s 127.0.0.0/8 -d 127.0.0.0/8"
    ' -m comment --comment "block incoming localnet connections"'
    " -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)
"""The rule in KUBE-FIREWALL, IPv4 alone, that has to be in force before route_localnet is set: otherwise
neighbors reach what listens on 127.0.0.1 only (CVE-2020-8558). `modes.netfilter` waits for it and
for the jumps to it (`node_rules.LOOPBACK_GUARD`). The rule is there also where the sysctl is not set."""

LAYOUT = Layout(
    shared=frozenset(SHARED_CHAINS),
    exclusive=frozenset(NODE_CHAINS),
    service_prefixes=names.SERVICE_PREFIXES,
    jump_targets=JUMP_TARGETS,
    last={(NAT, names.SERVICES): names.NODE_PORTS},
    partly_owned={(FILTER, names.FIREWALL): frozenset({LOCALNET_GUARD})},
)
