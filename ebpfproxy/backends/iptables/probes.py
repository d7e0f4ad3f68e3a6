"""Probes what mode iptables requires or prefers of this machine; see `xtables.probing`."""

from collections.abc import Collection

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.iptables import packet_counters
from ebpfproxy.backends.iptables.layout import INVALID_DROPPED, counting
from ebpfproxy.backends.xtables import probing, tool_backends
from ebpfproxy.backends.xtables.entries import FILTER, NAT
from ebpfproxy.backends.xtables.probing import RuleKind
from ebpfproxy.model.address import Family

_RECENT = "-m recent --set --name EBPFPROXY --rsource"

PACKET_COUNTERS = RuleKind(
    "packet counters",
    FILTER,
    f"{counting(INVALID_DROPPED)} -j RETURN",
    "nfnetlink_acct and xt_nfacct",
    "the metrics kubeproxy_iptables_* are missing: dropped INVALID packets and NodePorts on 127.0.0.0/8 are "
    "not counted",
)
"""Requires nfacct in the kernel, and libxt_nfacct.so of the tool."""

_RULE_KINDS = (
    RuleKind(
        "destination NAT", NAT, "-p tcp -m tcp -j DNAT --to-destination {address}:80", "nft_nat or xt_nat"
    ),
    probing.MASQUERADING,
    probing.MARKS,
    probing.COMMENTS,
    RuleKind("random choice", NAT, "-m statistic --mode random --probability 0.5 -j RETURN", "xt_statistic"),
    probing.ADDRESS_TYPES,
    probing.STATES,
    probing.REJECTING,
    probing.MANGLING,
    probing.RANDOM_PORTS,
    RuleKind(
        "recent clients",
        NAT,
        f"{_RECENT} -j RETURN",
        "xt_recent",
        "Services with sessionAffinity ClientIP are not served",
    ),
    RuleKind(
        "SCTP",
        NAT,
        "-p sctp -m sctp --dport 80 -j DNAT --to-destination {address}:80",
        "xt_sctp",
        "ports with the protocol SCTP are not served",
    ),
    PACKET_COUNTERS,
)


def probe(tool_backend: str = tool_backends.AUTO, used: Collection[Family] = ()) -> tuple[Finding, ...]:
    """Return the findings; see `probing.probe`."""
    return probing.probe(tool_backend, _RULE_KINDS, packet_counters.prepare, used)
