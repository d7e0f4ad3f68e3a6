"""What rules a node's iptables takes: those of each sort are tried.

They are written where no traffic is, in a network namespace that goes again; the tables of this one are only
read, for the backend that they are in.
"""

import contextlib
import errno
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.xtables import tool_backends
from ebpfproxy.backends.xtables.entries import FILTER, MANGLE, NAT
from ebpfproxy.backends.xtables.rejections import nothing
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected, ToolBackend
from ebpfproxy.model.address import Family

_CHAIN = "EBPFPROXY-TRIED"


class Sort(NamedTuple):
    """Rules of one sort; `rule` may have an {address} in it. `module`: what the kernel has them by.
    `without`: what is missing where they are, "" where nothing could be served."""

    name: str
    table: str
    rule: str
    module: str
    without: str = ""


_ADDRESSES = {Family.IPV4: "192.0.2.1", Family.IPV6: "[2001:db8::1]"}

MASQUERADING = Sort("masquerading", NAT, "-j MASQUERADE", "nft_masq or xt_MASQUERADE")
MARKS = Sort("packet marks", NAT, "-m mark --mark 0x1/0x1 -j MARK --set-xmark 0x1/0x1", "xt_mark")
COMMENTS = Sort("comments", NAT, "-m comment --comment tried -j RETURN", "xt_comment")
ADDRESS_TYPES = Sort("types of addresses", NAT, "-m addrtype --dst-type LOCAL -j RETURN", "xt_addrtype")
STATES = Sort("states of connections", FILTER, "-m conntrack --ctstate NEW -j RETURN", "xt_conntrack")
REFUSING = Sort("refusing", FILTER, "-p udp -m udp -j REJECT", "nft_reject, ipt_REJECT or ip6t_REJECT")
MANGLING = Sort("the table mangle", MANGLE, "-j RETURN", "iptable_mangle or ip6table_mangle")
RANDOM_PORTS = Sort(
    "ports at random",
    NAT,
    "-j MASQUERADE --random-fully",
    "iptables 1.6.2",
    "masqueraded connections that begin at once may be given the same port, and one of them fails",
)


def probe(
    wanted: str,
    sorts: Sequence[Sort],
    prepare: Callable[[Family], None] = nothing,
    used: Collection[Family] = (),
) -> tuple[Finding, ...]:
    """What is needed comes first. It takes some 100 ms.

    A family that lacks something needed is not needed itself where the other one lacks nothing; what it lacks
    is preferred where the family is `used`. Rules that
    cannot be tried, for want of CAP_SYS_ADMIN, are not said to be missing.

    `wanted`: see `tool_backends.choose`. `prepare` makes what rules refer to, in the network namespace they
    are tried in. Raises KernelError where nothing can be tried at all.
    """
    try:
        chosen = tool_backends.choose(wanted)
    except Unsupported as lack:
        return (Finding("iptables", errno.ENOENT, lack.message, lack.hint),)
    found = {family: tuple(_probe(family, chosen, sorts, prepare)) for family in Family}
    usable = {family for family in Family if all(each.present or not each.needed for each in found[family])}
    for family in set(Family) - usable if usable else ():
        preferred = family in used
        found[family] = tuple(
            each._replace(needed=False, preferred=preferred and each.needed) for each in found[family]
        )
    return tuple(sorted((each for of in Family for each in found[of]), key=lambda each: not each.needed))


def _probe(
    family: Family, tool_backend: ToolBackend, sorts: Sequence[Sort], prepare: Callable[[Family], None]
) -> Iterator[Finding]:
    try:
        tool = iptables.find(family, tool_backend)
    except Unsupported as lack:
        yield Finding(f"iptables for {family.value}", errno.ENOENT, lack.message, lack.hint)
        return
    yield Finding(str(tool))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(netns.throw_away())
        except KernelError as failure:  # which serving does not take
            number = getattr(failure.__cause__, "errno", None) or errno.EOPNOTSUPP
            missing = f"they cannot be tried: {failure.message}"
            yield Finding(f"rules ({tool})", number, missing, failure.hint, needed=False)
            return
        prepare(family)
        rejected = _rejected(tool, sorts)
    for sort in sorts:
        feature = f"{sort.name} ({tool})"
        needed = not sort.without
        if sort not in rejected:
            yield Finding(feature, needed=needed)
            continue
        remedy = f"load or enable what the kernel has it by: {sort.module}; or use a newer iptables"
        yield Finding(feature, errno.EOPNOTSUPP, sort.without or rejected[sort], remedy, needed)


def _rejected(tool: Iptables, sorts: Sequence[Sort]) -> dict[Sort, str]:
    """All at once, since that is what nearly always goes well; else one by one."""
    if _restore(tool, sorts) is None:
        return {}
    alone = {sort: _restore(tool, (sort,)) for sort in sorts}
    return {sort: reason for sort, reason in alone.items() if reason is not None}


def _restore(tool: Iptables, sorts: Iterable[Sort]) -> str | None:
    """Why it is rejected; None where it is not."""
    lines = []
    for table, those in itertools.groupby(sorted(sorts, key=_table), _table):
        rules = (each.rule.format(address=_ADDRESSES[tool.family]) for each in those)
        lines += [f"*{table}", f":{_CHAIN} - [0:0]", *(f"-A {_CHAIN} {rule}" for rule in rules), "COMMIT"]
    try:
        tool.restore("\n".join([*lines, ""]))
    except (LinesRejected, Unsupported) as failure:
        return failure.message
    return None


def _table(sort: Sort) -> str:
    return sort.table
