"""Probes what mode ipvs requires of this machine, by trying it in a temporary network namespace."""

import errno
from collections.abc import Callable, Collection, Iterator

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.iptables import probes
from ebpfproxy.backends.iptables.entries import NAT
from ebpfproxy.backends.iptables.probes import RuleKind
from ebpfproxy.backends.ipvs import prerequisites
from ebpfproxy.backends.ipvs.ip_sets import create_all
from ebpfproxy.backends.ipvs.settings import DEFAULT_SCHEDULER
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import ipset
from ebpfproxy.linux.ipset import IpSet
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.netlink import dummy, owned_devices
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.linux.netlink.owned_devices import MODULES, TUNNELS
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Family, parse_address

_SET = "ebpfproxy-tried"
_LOCAL = {Family.IPV4: parse_address("192.0.2.1"), Family.IPV6: parse_address("2001:db8::1")}
"""Addresses for documentation (RFC 5737, RFC 3849), for tunnel devices that no packet reaches."""
_OF_SETS = (
    "ip_set",
    *("ip_set_hash_ip", "ip_set_hash_ipport", "ip_set_hash_ipportip", "ip_set_hash_ipportnet"),
    "ip_set_bitmap_port",
)
"""The modules of ipsets."""

_RULE_KINDS = (
    RuleKind("matching ipsets", NAT, f"-m set --match-set {_SET} dst,dst -j RETURN", "xt_set"),
    probes.MASQUERADING,
    probes.MARKS,
    probes.COMMENTS,
    probes.ADDRESS_TYPES,
    probes.STATES,
    probes.REJECTING,
    probes.MANGLING,
)


def probe(
    scheduler: str = DEFAULT_SCHEDULER,
    tool_backend: str = probes.AUTO,
    used: Collection[Family] = (),
    tunnels: bool = False,
) -> tuple[Finding, ...]:
    """Return the findings, needed features first. Raises KernelError if nothing can be tried at all.

    `tunnels`: Services use them by default.
    """
    prerequisites = tuple(_prerequisites(scheduler))
    if any(not each.present for each in prerequisites):
        return prerequisites  # rules would be rejected for the same reason
    found = prerequisites + probes.probe_rules(tool_backend, _RULE_KINDS, _make_set, used)
    return found + tuple(_tunnels(used) if tunnels else ())


def _prerequisites(scheduler: str) -> Iterator[Finding]:
    with netns.throw_away():
        yield _attempt("IPVS", ipvs.available, "ip_vs")
        yield _attempt(
            f"IPVS: the scheduler {scheduler}",
            lambda: prerequisites.check_scheduler(scheduler),
            f"ip_vs_{scheduler}",
        )
        yield _attempt("ipset", ipset.available, "ip_set")
        yield _attempt("dummy devices", lambda: dummy.ensure(KUBE_IPVS0), "dummy")
        for family in Family:
            yield _attempt(f"ipset for {family.value}", lambda family=family: create_all(family), *_OF_SETS)  # type: ignore[misc]
    yield _attempt("sysctls of IPVS", prerequisites.check_sysctls)  # in the agent's own network namespace


def _tunnels(used: Collection[Family]) -> Iterator[Finding]:
    """Try the tunnel devices of endpoints. Without them, mode ipvs serves all other Services."""
    with netns.throw_away():
        for family, address in _LOCAL.items():
            if used and family not in used:
                continue
            kind = TUNNELS[family]
            found = _attempt(
                f"tunnel devices for {family.value}",
                lambda kind=kind, address=address: owned_devices.create(f"ebp-{kind}", kind, address),  # type: ignore[misc]
                MODULES[kind],
            )
            yield found._replace(needed=False)


def _make_set(family: Family) -> None:
    ipset.change([ipset.creation(IpSet(_SET, "hash:ip,port", family))])


def _attempt(feature: str, action: Callable[[], object], *modules: str) -> Finding:
    try:
        action()
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or errno.EOPNOTSUPP
        return Finding(feature, number, failure.message, failure.hint, modules=modules)
    return Finding(feature)
