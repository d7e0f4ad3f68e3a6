"""The findings of the modes' probes, and of the checks of the node, as checks."""

from collections.abc import Iterable

from ebpfproxy.backends import bridge_checks, firewall_checks
from ebpfproxy.backends.findings import Finding
from ebpfproxy.diagnose.doctor.check import NODE, Check, State
from ebpfproxy.diagnose.doctor.links import Page

_PAGES = {
    "ebpf": Page.EBPF_FEATURES,
    "nftables": Page.NFTABLES,
    "iptables": Page.IPTABLES,
    "ipvs": Page.IPVS,
    "userspace": Page.USERSPACE,
    NODE: Page.UPLINKS,
}
_OF_EBPF = (
    (("first place ",), Page.FIRST_PLACE),
    (("XDP ",), Page.XDP),
    (("direct server return",), Page.DIRECT_RETURN),
    (("reconnecting ", "destroying "), Page.STALE_SOCKETS),
    (("bpf(2)", "cgroup v2", "bpffs", "compiled ", "bcc", "C headers", "probing"), Page.EBPF_START),
)
"""Beginnings of features of mode ebpf, with their page."""
_OF_NODE = {
    firewall_checks.FORWARD: Page.FORWARD,
    firewall_checks.BEFORE_NAT: Page.FIREWALLS,
    firewall_checks.UNREAD: Page.FIREWALLS,
}


def checks(subject: str, findings: Iterable[Finding]) -> tuple[Check, ...]:
    """`subject`: the name of the mode; NODE for checks of the node."""
    return tuple(_check(subject, each) for each in findings)


def _check(subject: str, finding: Finding) -> Check:
    page = _page(subject, finding.feature)
    if finding.present:
        return Check(subject, finding.feature, State.PRESENT, "", "", page)
    state = State.REQUIRED if finding.needed else State.OPTIONAL
    return Check(subject, finding.feature, state, finding.missing, finding.remedy, page)


def _page(subject: str, feature: str) -> Page:
    if subject == "ebpf":
        return next((page for names, page in _OF_EBPF if feature.startswith(names)), Page.EBPF_FEATURES)
    if feature.startswith(bridge_checks.REPLIES):
        return Page.BRIDGES
    return _OF_NODE.get(feature) or _PAGES.get(subject, Page.EBPF_START)
