"""Probes what mode iptables requires or prefers of this machine; see `xtables.probing`."""

from collections.abc import Collection

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.xtables import probing, tool_backends
from ebpfproxy.backends.xtables.entries import NAT
from ebpfproxy.backends.xtables.probing import RuleKind
from ebpfproxy.model.address import Family

_RECENT = "-m recent --set --name EBPFPROXY --rsource"

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
)


def probe(tool_backend: str = tool_backends.AUTO, used: Collection[Family] = ()) -> tuple[Finding, ...]:
    """Return the findings; see `probing.probe`."""
    return probing.probe(tool_backend, _RULE_KINDS, used=used)
