"""Selects the iptables backend of this node, legacy or nft, and probes which rules it accepts.

If both backends have rules, both are in force at once, and each tool shows only its own. So an agent that
starts last must use the backend of the others. Kubernetes requires this of everything that runs in a
container (github.com/kubernetes-sigs/iptables-wrappers).

Each kind of rule is written in a temporary network namespace without traffic. In the agent's own network
namespace, tables are only read, to select the iptables backend.
"""

import contextlib
import errno
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.iptables import chains, packet_counters
from ebpfproxy.backends.iptables.chains import INVALID_DROPPED, counting
from ebpfproxy.backends.iptables.entries import FILTER, MANGLE, NAT
from ebpfproxy.backends.iptables.tables import prepare_nothing
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected, ToolBackend
from ebpfproxy.model.address import Family

AUTO = "auto"

_HINTS = (
    ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"),  # kubelet since 1.24 and since 1.17
    (chains.CANARY,),  # kube-proxy, or a previous run of the agent
)
"""Chains of the table mangle that show the backend, by the program that created them. The first match
decides.
"""


def choose(wanted: str) -> ToolBackend:
    """Return the backend `wanted`. For AUTO, return the backend that has hints, otherwise the one with more
    rules, otherwise the backend of the tool named iptables.

    AUTO only considers installed tools. No table is created in either backend. Raises Unsupported if no tool
    is installed, Rejected if reading is not permitted.
    """
    if wanted != AUTO:
        return ToolBackend(wanted)
    tools = installed()
    if not tools:
        raise Unsupported("cannot find iptables", "install it: apt-get install iptables, or apk add iptables")
    if len(tools) == 1:
        return next(iter(tools))
    return (
        _hinted(tools)
        or _with_more_rules(tools)
        or iptables.plain_tool_backend(Family.IPV4)
        or ToolBackend.NFT
    )


def installed() -> dict[ToolBackend, list[Iptables]]:
    """Return the installed tools by backend, for one family or both."""
    found: dict[ToolBackend, list[Iptables]] = {}
    for tool_backend in ToolBackend:
        for family in Family:
            try:
                found.setdefault(tool_backend, []).append(iptables.find(family, tool_backend))
            except Unsupported:
                continue
    return {tool_backend: tools for tool_backend, tools in found.items() if tools}


def _hinted(tools: Mapping[ToolBackend, list[Iptables]]) -> ToolBackend | None:
    """Return the backend with a hint. If both have one, nft is the newer one."""
    for hints in _HINTS:
        for tool_backend in (ToolBackend.NFT, ToolBackend.LEGACY):
            if any(tool.show(MANGLE, hint) for tool in tools[tool_backend] for hint in hints):
                return tool_backend
    return None


def _with_more_rules(tools: Mapping[ToolBackend, list[Iptables]]) -> ToolBackend | None:
    """Return the backend with more rules, None if both have the same number."""
    rules = {
        tool_backend: sum(tool.save().count("\n-A ") for tool in each) for tool_backend, each in tools.items()
    }
    if rules[ToolBackend.LEGACY] == rules[ToolBackend.NFT]:
        return None
    return max(rules, key=rules.__getitem__)


_CHAIN = "EBPFPROXY-TRIED"
_NO_NAMESPACE = frozenset({errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOSPC})
"""Errors of unshare(2): not permitted, not in the kernel, or more than /proc/sys/user/max_net_namespaces."""
_MODULE = re.compile(r"\b(?:nft|nfnetlink|xt|ipt|ip6t|iptable|ip6table)_\w+")


class RuleKind(NamedTuple):
    """A kind of rule to try.

    - `rule`: its text, which may contain {address}.
    - `module`: the kernel modules or the tool version that provide it.
    - `without`: the limitation without it; "" if the mode cannot serve without it.
    """

    name: str
    table: str
    rule: str
    module: str
    without: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """The kernel modules in `module`.

        >>> RuleKind("masquerading", NAT, "-j MASQUERADE", "nft_masq or xt_MASQUERADE").modules
        ('nft_masq', 'xt_MASQUERADE')
        """
        return tuple(_MODULE.findall(self.module))


_ADDRESSES = {Family.IPV4: "192.0.2.1", Family.IPV6: "[2001:db8::1]"}

MASQUERADING = RuleKind("masquerading", NAT, "-j MASQUERADE --random-fully", "nft_masq or xt_MASQUERADE")
MARKS = RuleKind("packet marks", NAT, "-m mark --mark 0x1/0x1 -j MARK --set-xmark 0x1/0x1", "xt_mark")
COMMENTS = RuleKind("comments", NAT, "-m comment --comment tried -j RETURN", "xt_comment")
ADDRESS_TYPES = RuleKind("address types", NAT, "-m addrtype --dst-type LOCAL -j RETURN", "xt_addrtype")
STATES = RuleKind("connection states", FILTER, "-m conntrack --ctstate NEW -j RETURN", "xt_conntrack")
REJECTING = RuleKind("rejecting", FILTER, "-p udp -m udp -j REJECT", "nft_reject, ipt_REJECT or ip6t_REJECT")
MANGLING = RuleKind("the table mangle", MANGLE, "-j RETURN", "iptable_mangle or ip6table_mangle")


def probe_rules(
    wanted: str,
    kinds: Sequence[RuleKind],
    prepare: Callable[[Family], None] = prepare_nothing,
    used: Collection[Family] = (),
) -> tuple[Finding, ...]:
    """Return the findings, needed features first. It takes about 100 ms.

    If one family lacks something needed and the other one does not, the findings of the first are not needed.
    They are preferred if that family is in `used`. Rules that cannot be tried, because CAP_SYS_ADMIN is
    missing, are not reported as missing.

    `wanted`: see `choose`. `prepare` creates the objects that the rules refer to, in the
    temporary network namespace. Raises KernelError if nothing can be tried at all.
    """
    try:
        tool_backend = choose(wanted)
    except Unsupported as lack:
        return (Finding("iptables", errno.ENOENT, lack.message, lack.hint),)
    found = {family: tuple(_probe(family, tool_backend, kinds, prepare)) for family in Family}
    usable = {family for family in Family if all(each.present or not each.needed for each in found[family])}
    for family in set(Family) - usable if usable else ():
        preferred = family in used
        found[family] = tuple(
            each._replace(needed=False, preferred=preferred and each.needed) for each in found[family]
        )
    return tuple(
        sorted((each for family in Family for each in found[family]), key=lambda each: not each.needed)
    )


def accepts(tool: Iptables, kind: RuleKind, prepare: Callable[[Family], None] = prepare_nothing) -> bool:
    """Return whether the tool and the kernel accept a kind of rule; False if a temporary network namespace
    is not permitted.

    `prepare`: see `probe`. Raises KernelError if it fails for a reason that may pass, such as missing memory.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(netns.throw_away())
        except KernelError as failure:
            if getattr(failure.__cause__, "errno", 0) in _NO_NAMESPACE:
                return False
            raise
        prepare(tool.family)
        return _restore(tool, (kind,)) is None


def _probe(
    family: Family, tool_backend: ToolBackend, kinds: Sequence[RuleKind], prepare: Callable[[Family], None]
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
        except KernelError as failure:  # serving does not require a network namespace of its own
            number = getattr(failure.__cause__, "errno", None) or errno.EOPNOTSUPP
            missing = f"they cannot be tried: {failure.message}"
            yield Finding(f"rules ({tool})", number, missing, failure.hint, needed=False)
            return
        prepare(family)
        rejected = _rejected(tool, kinds)
    for kind in kinds:
        feature = f"{kind.name} ({tool})"
        needed = not kind.without
        if kind not in rejected:
            yield Finding(feature, needed=needed)
            continue
        remedy = f"provide {kind.module}, or use a newer iptables"
        missing = kind.without or rejected[kind]
        yield Finding(feature, errno.EOPNOTSUPP, missing, remedy, needed, modules=kind.modules)


def _rejected(tool: Iptables, kinds: Sequence[RuleKind]) -> dict[RuleKind, str]:
    """Return the rejected kinds and the reasons. Try all at once first, which nearly always succeeds;
    otherwise try them one by one.
    """
    if _restore(tool, kinds) is None:
        return {}
    alone = {kind: _restore(tool, (kind,)) for kind in kinds}
    return {kind: reason for kind, reason in alone.items() if reason is not None}


def _restore(tool: Iptables, kinds: Iterable[RuleKind]) -> str | None:
    """Return why the rules are rejected, None if they are accepted."""
    lines = []
    for table, in_table in itertools.groupby(sorted(kinds, key=_table), _table):
        rules = (each.rule.format(address=_ADDRESSES[tool.family]) for each in in_table)
        lines += [f"*{table}", f":{_CHAIN} - [0:0]", *(f"-A {_CHAIN} {rule}" for rule in rules), "COMMIT"]
    try:
        tool.restore("\n".join([*lines, ""]))
    except (LinesRejected, Unsupported) as failure:
        return failure.message
    return None


def _table(kind: RuleKind) -> str:
    return kind.table


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
    MASQUERADING,
    MARKS,
    COMMENTS,
    RuleKind("random choice", NAT, "-m statistic --mode random --probability 0.5 -j RETURN", "xt_statistic"),
    ADDRESS_TYPES,
    STATES,
    REJECTING,
    MANGLING,
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


def probe(tool_backend: str = AUTO, used: Collection[Family] = ()) -> tuple[Finding, ...]:
    """Return the findings for mode iptables; see `probe_rules`."""
    return probe_rules(tool_backend, _RULE_KINDS, packet_counters.prepare, used)
