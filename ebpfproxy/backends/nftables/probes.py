"""Probes what mode nftables requires of this machine, by trying it.

All parts are added to a dormant table, which no packet reaches, in a transaction that is always aborted. So
none is ever in force, but the kernel reports for each whether it supports it. It loads the same modules as
when the mode serves.
"""

import errno
import os
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.nftables import coexistence
from ebpfproxy.backends.nftables.entries import nft_family
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.nft import messages, nft
from ebpfproxy.linux.nft.draws import Draw
from ebpfproxy.linux.nft.messages import Hook, Operation, Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.rule_expressions import SetNames
from ebpfproxy.linux.nft.sets import parse_declaration
from ebpfproxy.model.address import Family

_NAME = "ebpfproxy-probe"
_TEMPORARY = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR})
_REMEDY = "modprobe nf_tables; requires CONFIG_NF_TABLES"


class _Part(NamedTuple):
    """A feature to try. `module`: the module that provides it, "" for nf_tables itself."""

    feature: str
    rule: Rule
    module: str = ""
    hook: Hook = Hook("filter", "input", 0)


_PREROUTING = Hook("nat", "prerouting", -100)
_EXAMPLES = {
    "ip": ("{ 192.0.2.0/25, 192.0.2.200 }", "192.0.2.1:1"),
    "ip6": ("{ 2001:db8::/64, 2001:db8:1::1 }", "[2001:db8::1]:1"),
}


def _parts(ip: str) -> tuple[_Part, ...]:
    ranges, endpoint = _EXAMPLES[ip]
    version = "ipv4" if ip == "ip" else "ipv6"
    constant = "numgen random mod 1 offset 1"
    remember = f"update @clients {{ {ip} saddr . {constant} timeout 1s }}"
    dnat = f"meta l4proto tcp dnat {ip} to {constant} . {constant} . numgen random mod 1 map @endpoints"
    return (
        _Part("verdict maps", Rule("meta l4proto . th dport vmap @map")),
        _Part("dynamic sets", Rule(remember), "nft_numgen"),
        _Part("interval sets", Rule(f"{ip} saddr != {ranges} drop")),
        _Part("random choice", Rule("numgen random mod 2 0 drop"), "nft_numgen"),
        _Part("comparison of bytes", Rule("@nh,120,8 . @nh,152,8 @bytes drop")),
        _Part("connection tracking", Rule("ct state new drop"), "nft_ct"),
        _Part("address types", Rule("fib daddr type local drop"), f"nft_fib_{version}"),
        _Part("rejecting", Rule("reject"), f"nft_reject_{version}"),
        _Part("counters", Rule("counter drop"), "nft_counter"),
        _Part("DNAT", Rule(f"meta l4proto tcp dnat to {endpoint}"), "nft_nat", _PREROUTING),
        _Part("DNAT with a map", Rule(dnat), "nft_nat", _PREROUTING),
        _Part("masquerading", Rule("masquerade fully-random"), "nft_masq", Hook("nat", "postrouting", 100)),
    )


_PARTS = {ip: _parts(ip) for ip in _EXAMPLES}


def probe(used: Collection[Family] = ()) -> tuple[Finding, ...]:
    """Return the findings for the network namespace of the calling thread. It takes 30 ms if no module has to
    be loaded.

    A family is needed only if the other one is missing as well. A family in `used` is preferred.
    """
    try:
        with Session() as session:
            found = {family: serves(session, family) for family in Family}
            served = [family for family in Family if found[family].present]
            hashes = [_hashes(session, family) for family in served[:1]]
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or errno.EOPNOTSUPP
        if nft.has_none(failure):
            return (Finding("nftables", number, failure.message, _REMEDY, modules=("nf_tables",)),)
        return (Finding("nftables", number, failure.message, failure.hint),)
    families = [each._replace(needed=not served, preferred=family in used) for family, each in found.items()]
    return (*families, _nat_chains(), coexistence.nft_tool(), *hashes) if served else tuple(families)


def _hashes(session: Session, family: Family) -> Finding:
    """Return whether rules can select an endpoint by a hash. Any family shows it."""
    feature, table = "hashes of addresses", Table(nft_family(family), _NAME)
    rule = Rule(f"{Draw.BY_SOURCE.text(table.family, 2)} 0 drop")
    operations = [
        messages.add_table(table, dormant=True),
        messages.add_chain(table, "part"),
        *messages.add_rule(table, "part", rule, SetNames()),
    ]
    rejections = session.attempt(operations)
    if not rejections:
        return Finding(feature, needed=False)
    number, missing = rejections[0].errno, "Services with lb-algorithm source-hash or maglev are rejected"
    return Finding(feature, number, missing, "modprobe nft_hash", needed=False, modules=("nft_hash",))


def _nat_chains() -> Finding:
    feature = "NAT chains besides those of other programs"
    if coexistence.nat_chains_coexist():
        return Finding(feature)
    return Finding(
        feature,
        errno.EBUSY,
        "this kernel runs only the first NAT chain",
        "use Linux 4.18 or --proxy-mode=iptables",
    )


def serves(session: Session, family: Family) -> Finding:
    """Return whether one family can be served.

    Raises KernelError if nftables cannot be changed at all, or if memory is missing.
    """
    table = Table(nft_family(family), _NAME)
    parts = _PARTS[table.family]
    operations = list(_operations(table))
    owners = [owner for owner, _ in operations]
    feature = f"nftables for {family.value}"
    rejections = session.attempt([operation for _, operation in operations])
    if not rejections:
        return Finding(feature)
    number = rejections[0].errno
    if number in _TEMPORARY:
        raise nft.failure(f"cannot try {feature}", number, rejections[0].reason)
    missing = sorted({owners[each.position] for each in rejections})
    if missing[0] < 0:
        reason = f"no tables of this family: {os.strerror(number)}"
        return Finding(feature, number, reason, f"use a kernel with CONFIG_NF_TABLES_{family.value.upper()}")
    modules = tuple(sorted({parts[each].module or "nf_tables" for each in missing}))
    lacking = ", ".join(parts[each].feature for each in missing)
    missing_text, remedy = f"this kernel lacks {lacking}", f"modprobe -a {' '.join(modules)}"
    return Finding(feature, number, missing_text, remedy, modules=modules)


def _operations(table: Table) -> Iterator[tuple[int, Operation]]:
    """Yield the operations, each with the index of its part; -1 for the table itself."""
    names = SetNames()
    address = "ipv4_addr" if table.family == "ip" else "ipv6_addr"
    yield -1, messages.add_table(table, dormant=True)
    declared = {
        "map": "type inet_proto . inet_service : verdict;",
        "clients": f"type {address} . mark; size 65535; flags dynamic,timeout;",
        "bytes": "type mark . mark;",
        "endpoints": f"type mark . mark . mark : {address} . inet_service;",
    }
    owners = {name: _part_with(table, f"@{name}") for name in declared}
    for name, text in declared.items():
        yield owners[name], messages.add_set(table, name, parse_declaration(text), names.number())
    for index, part in enumerate(_PARTS[table.family]):
        yield index, messages.add_chain(table, f"part-{index}", part.hook)
        for operation in messages.add_rule(table, f"part-{index}", part.rule, names):
            yield index, operation


def _part_with(table: Table, word: str) -> int:
    """Return the index of the first part whose rule contains this word."""
    rules = [str(part.rule).split(" ") for part in _PARTS[table.family]]
    return next(index for index, words in enumerate(rules) if word in words)
