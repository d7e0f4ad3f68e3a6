"""What the nftables backend needs of this machine, found by trying.

All of it is put into a table that no packet comes to (dormant), in a transaction that cannot come about. So
nothing of it is ever in force, and yet the kernel says of each part whether it has that; it loads modules for
them as it would when we serve.
"""

import errno
import os
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.nftables import old_nft, other_nat
from ebpfproxy.backends.nftables.entries import nft_family
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.nft import messages, nft
from ebpfproxy.linux.nft.compile import compile_rule
from ebpfproxy.linux.nft.messages import Hook, Operation, SetNames, Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.sets import parse_declaration
from ebpfproxy.model.address import Family

_NAME = "ebpfproxy-probe"
_WITHOUT = "modprobe nf_tables; it takes CONFIG_NF_TABLES"


class _Part(NamedTuple):
    """`rule` has the family's name in it. `module` is what to load where it is one; none: it is in nf_tables
    itself."""

    feature: str
    rule: str
    module: str = ""
    hook: Hook = Hook("filter", "input", 0)


_PREROUTING = Hook("nat", "prerouting", -100)

_PARTS: dict[str, tuple[_Part, ...]] = {
    "ip": (
        _Part("maps of verdicts", "meta l4proto . th dport vmap @map"),
        _Part("sets that packets fill", "update @clients { ip saddr timeout 1s }"),
        _Part("sets of ranges", "ip saddr != { 192.0.2.0/25, 192.0.2.200 } drop"),
        _Part("choice by chance", "numgen random mod 1 vmap { 0 : drop }", "nft_numgen"),
        _Part(
            "sets of connections",
            "ct status dnat ip saddr . ip daddr . meta l4proto . th dport @connections drop",
            "nft_ct",
        ),
        _Part("connection tracking", "ct state new drop", "nft_ct"),
        _Part("kinds of addresses", "fib daddr type local drop", "nft_fib_ipv4"),
        _Part("rejecting", "reject", "nft_reject_ipv4"),
        _Part("DNAT", "meta l4proto tcp dnat to 192.0.2.1:1", "nft_nat", _PREROUTING),
        _Part(
            "DNAT by a map",
            "meta l4proto tcp dnat ip to numgen random mod 1 map { 0 : 192.0.2.1 . 1 }",
            "nft_nat",
            _PREROUTING,
        ),
        _Part("masquerading", "masquerade fully-random", "nft_masq", Hook("nat", "postrouting", 100)),
    )
}
_PARTS["ip6"] = tuple(
    each._replace(
        rule=each.rule.replace("ip saddr", "ip6 saddr")
        .replace("ip daddr", "ip6 daddr")
        .replace("dnat ip to", "dnat ip6 to")
        .replace("192.0.2.0/25, 192.0.2.200", "2001:db8::/64, 2001:db8:1::1")
        .replace("192.0.2.1:1", "[2001:db8::1]:1")
        .replace("192.0.2.1 .", "2001:db8::1 ."),
        module=each.module.replace("ipv4", "ipv6"),
    )
    for each in _PARTS["ip"]
)


def probe(used: Collection[Family] = ()) -> tuple[Finding, ...]:
    """In the network namespace of the calling thread. It takes 30 ms where no module has to be
    loaded.

    A family is needed only where the other one is missing, too; one that is `used` is preferred.
    """
    try:
        with Session() as session:
            found = {of: serves(session, of) for of in Family}
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or errno.EOPNOTSUPP
        remedy = _WITHOUT if nft.has_none(failure) else failure.hint
        return (Finding("nftables", number, failure.message, remedy),)
    any_there = any(each.present for each in found.values())
    families = [each._replace(needed=not any_there, preferred=of in used) for of, each in found.items()]
    return (*families, _beside_others(), old_nft.finding()) if any_there else tuple(families)


def _beside_others() -> Finding:
    feature = "nftables' NAT beside that of others"
    if other_nat.is_asked():
        return Finding(feature)
    return Finding(
        feature, errno.EBUSY, "this kernel asks one NAT alone", "Linux 4.18; or --proxy-mode=iptables"
    )


def serves(session: Session, of: Family) -> Finding:
    """Whether one family can be served. Raises KernelError where nftables cannot be changed at all."""
    table = Table(nft_family(of), _NAME)
    parts = _PARTS[table.family]
    operations = list(_operations(table))
    owners = [owner for owner, _ in operations]
    feature = f"nftables for {of.value}"
    rejections = session.attempt([operation for _, operation in operations])
    if not rejections:
        return Finding(feature)
    missing = sorted({owners[each.position] for each in rejections})
    number = rejections[0].errno
    if missing[0] < 0:
        reason = f"no tables of this family: {os.strerror(number)}"
        return Finding(feature, number, reason, f"it takes CONFIG_NF_TABLES_{of.value.upper()}")
    modules = " ".join(sorted({parts[each].module or "nf_tables" for each in missing}))
    lacking = ", ".join(parts[each].feature for each in missing)
    return Finding(feature, number, f"this kernel lacks {lacking}", f"modprobe -a {modules}")


def _operations(table: Table) -> Iterator[tuple[int, Operation]]:
    """Each with the place of the part that it is for, -1 for the table itself."""
    names = SetNames()
    address = "ipv4_addr" if table.family == "ip" else "ipv6_addr"
    yield -1, messages.add_table(table, dormant=True)
    declared = {
        "map": "type inet_proto . inet_service : verdict;",
        "clients": f"type {address}; size 65535; flags dynamic,timeout;",
        "connections": f"type {address} . {address} . inet_proto . inet_service;",
    }
    owners = {name: _place(table, f"@{name}") for name in declared}
    for name, text in declared.items():
        yield owners[name], messages.add_set(table, name, parse_declaration(text), names.number())
    for place, part in enumerate(_PARTS[table.family]):
        yield place, messages.add_chain(table, f"part-{place}", part.hook)
        rule = compile_rule(part.rule, table.family)
        for operation in messages.add_rule(table, f"part-{place}", rule, names):
            yield place, operation


def _place(table: Table, word: str) -> int:
    """Of the part whose rule has this word."""
    rules = [part.rule.split(" ") for part in _PARTS[table.family]]
    return next(place for place, words in enumerate(rules) if word in words)
