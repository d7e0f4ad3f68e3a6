"""What mode ipvs requires of this machine: the scheduler, sysctls that kube-proxy sets as well, and what is
probed in a temporary network namespace.

For kernels 4.1 to 5.8, kube-proxy also sets conn_reuse_mode to 0. On these kernels, a client that reuses a
port waits one second otherwise (fixed by f0a5e4d7a594, "ipvs: allow connection reuse for unconfirmed
conntrack", 5.9). But with 0, IPVS sends new connections to removed endpoints (kubernetes issue 81775). So the
agent leaves it unchanged.

Sources: NewProxier() in pkg/proxy/ipvs/proxier.go; Documentation/networking/ipvs-sysctl.rst.
"""

import errno
from collections.abc import Callable, Collection, Iterator

from ebpfproxy.backends.difference import DIFFERENT, MISSING, Difference
from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.iptables import probes
from ebpfproxy.backends.iptables.entries import NAT
from ebpfproxy.backends.iptables.probes import RuleKind
from ebpfproxy.backends.ipvs.entries import DEFAULT_SCHEDULER
from ebpfproxy.backends.ipvs.sets import create_all
from ebpfproxy.backends.netfilter.sysctls import REMEDY, Sysctl
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux import ipset, sysctl
from ebpfproxy.linux.ipset import IpSet
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.netlink import dummy, owned_devices
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.linux.netlink.owned_devices import MODULES, TUNNELS
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Family, parse_address

KNOWN = ("rr", "wrr", "lc", "wlc", "fo", "ovf", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "twos")
"""The schedulers of Linux 6.12, to list those of the kernel. Others are also accepted."""

_MAX_NAME = 15
"""IP_VS_SCHEDNAME_MAXLEN without the zero byte. The kernel does not parse a message with a longer name."""


def check_scheduler(wanted: str) -> None:
    """Raise Unsupported with the available schedulers if the kernel does not have this one, or if it has no
    IPVS.
    """
    with netns.throw_away():
        ipvs.available()
        if has_scheduler(wanted):
            return
        found = [each for each in KNOWN if has_scheduler(each)]
    raise Unsupported(
        f"this kernel has no scheduler {wanted} for IPVS; it has {', '.join(found) or 'none'}",
        f"modprobe ip_vs_{wanted}, or select another one: --ipvs-scheduler",
    )


def has_scheduler(scheduler: str) -> bool:
    """Return whether the kernel has the scheduler. Call it in a temporary network namespace."""
    if len(scheduler) > _MAX_NAME:
        return False
    try:
        ipvs.probe_scheduler(scheduler)
    except Unsupported:
        return False
    return True


_ALWAYS = (
    Sysctl(
        "net/ipv4/vs/conntrack",
        1,
        without="connections that must be masqueraded keep their source",
        needed=True,
    ),
    Sysctl(
        "net/ipv4/ip_forward", 1, without="endpoints on other nodes and in pods are unreachable", needed=True
    ),
    Sysctl(
        "net/ipv4/vs/expire_nodest_conn", 1, without="connections to removed endpoints wait for a timeout"
    ),
    Sysctl(
        "net/ipv4/vs/expire_quiescent_template",
        1,
        without="with session affinity, clients keep a draining endpoint",
    ),
)
_STRICT_ARP = (
    Sysctl("net/ipv4/conf/all/arp_ignore", 1, without="the node answers ARP for addresses of Services"),
    Sysctl("net/ipv4/conf/all/arp_announce", 2, without="the node announces addresses of Services"),
)


def check_sysctls() -> None:
    """Raise Unsupported, like `sysctls.apply`, if a needed sysctl has another value and is not writable. Sets
    nothing.
    """
    needed = [each for each in _ALWAYS if each.needed]
    missing = [each.missing for each in needed if not sysctl.may_be(each.name, str(each.value))]
    if missing:
        raise Unsupported("; ".join(missing), REMEDY)


def differing_sysctls(strict_arp: bool) -> list[Difference]:
    """Return the desired sysctls with another value. Sets nothing."""
    found = []
    for each in desired_sysctls(strict_arp):
        try:
            value = sysctl.read(each.name)
        except KernelError:
            found.append(Difference(f"sysctl {each.name}", MISSING, each.without))
            continue
        if value != str(each.value):
            detail = f"have {value}; want {each.value}: {each.without}"
            found.append(Difference(f"sysctl {each.name}", DIFFERENT, detail))
    return found


def desired_sysctls(strict_arp: bool) -> tuple[Sysctl, ...]:
    """Return the desired sysctls. Those of IPVS exist only while it is loaded."""
    return (*_ALWAYS, *(_STRICT_ARP if strict_arp else ()))


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
    first = tuple(_prerequisites(scheduler))
    if any(not each.present for each in first):
        return first  # rules would be rejected for the same reason
    found = first + probes.probe_rules(tool_backend, _RULE_KINDS, _make_set, used)
    return found + tuple(_tunnels(used) if tunnels else ())


def _prerequisites(scheduler: str) -> Iterator[Finding]:
    with netns.throw_away():
        yield _attempt("IPVS", ipvs.available, "ip_vs")
        yield _attempt(
            f"IPVS: the scheduler {scheduler}",
            lambda: check_scheduler(scheduler),
            f"ip_vs_{scheduler}",
        )
        yield _attempt("ipset", ipset.available, "ip_set")
        yield _attempt("dummy devices", lambda: dummy.ensure(KUBE_IPVS0), "dummy")
        for family in Family:
            yield _attempt(f"ipset for {family.value}", lambda family=family: create_all(family), *_OF_SETS)  # type: ignore[misc]
    yield _attempt("sysctls of IPVS", check_sysctls)  # in the agent's own network namespace


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
