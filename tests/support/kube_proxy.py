"""What kube-proxy leaves in a node's kernel, as text for iptables-restore and nft: Services that answer, and
several hundred others of all shapes, as the texts of tests/golden/cases have them.

The kubelet's chains stand beside them (`KUBELETS`): they are to outlive kube-proxy.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ebpfproxy.api.parse import parse_manifest_object
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.backends.iptables.node_rules import node_entries
from ebpfproxy.backends.iptables.service_rules import service_entries
from ebpfproxy.backends.iptables.settings import IptablesSettings
from ebpfproxy.backends.nftables.entries import (
    TABLE,
    ChainEntry,
    Element,
    ElementEntry,
    Entry,
    Key,
    nft_family,
)
from ebpfproxy.backends.nftables.rendering import render
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.backends.xtables import entries as iptables_entries
from ebpfproxy.backends.xtables.entries import FILTER, MANGLE, NAT, RulePosition
from ebpfproxy.lab.manifests import Object
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.exposure import plan_service
from ebpfproxy.plan.service_plan import DetectLocal, NodePlan, PlanContext, ServicePortPlan
from tests.golden.situation import CASES, situations
from tests.support.build import networks
from tests.support.nft_listing import element_text

KUBELETS = frozenset({"KUBE-FIREWALL", "KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"})

_FAMILIES = {of.value: nft_family(of) for of in Family}
_COPIES = 3
_LOOPBACK = ("127.0.0.0/8", "::1/128")
_OF_A_SERVICE = re.compile(r"KUBE-(?:SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16}")
_ABSENT = re.compile(r"\bsctp\b")
"""Left out: protocols that a test's kernel need not have."""


def plans_of(objects: Sequence[Object], node: str, pods: Sequence[str]) -> list[ServicePortPlan]:
    """As a kube-proxy on that node plans them, that knows `pods`, CIDRs, by their addresses."""
    tracker = Tracker(started=0.0)
    for each in objects:
        for event in parse_manifest_object(json.dumps(each).encode(), node):
            tracker.fold(event)
    state = tracker.drain().state
    cidrs = tuple(map(parse_network, pods))
    context = PlanContext(node, detect_local=DetectLocal.CLUSTER_CIDR, cluster_cidrs=cidrs)
    return [
        plan
        for service in state.services.values()
        for plan in plan_service(service, state.slices_of(service.name).values(), None, context)
    ]


def iptables_text(plans: Sequence[ServicePortPlan], of: Family, addresses: Sequence[str]) -> str:
    """For iptables-restore: everything of one family on a node that has these addresses, in CIDR."""
    settings = IptablesSettings()
    entries = node_entries(_node(addresses), of, settings)
    for plan in plans:
        if plan.family is of:
            entries.update(service_entries(plan))
    rules: _Rules = {}
    for chain, rule in _former_rules(of):
        rules.setdefault(chain, []).append(rule)
    _add(rules, entries)
    for table in (FILTER, NAT, MANGLE):
        rules.setdefault((table, "KUBE-KUBELET-CANARY"), [])
    rules.setdefault((MANGLE, "KUBE-IPTABLES-HINT"), [])
    return "\n".join(line for table in (FILTER, NAT, MANGLE) for line in _table(table, rules)) + "\n"


def nftables_text(plans: Sequence[ServicePortPlan], addresses: Sequence[str]) -> str:
    """For nft: the tables of both families."""
    objects = _Objects()
    for key, entry in render(plans, _node(addresses), NftablesSettings()).items():
        objects.add(key, entry)
    for _, text in _copies("nftables.txt"):
        for head, lines in _blocks(text):
            *_, family = head.split(" ")
            if family in _FAMILIES and not _ABSENT.search(text):
                objects.take(_FAMILIES[family], lines)
    return objects.text()


def _node(addresses: Sequence[str]) -> NodePlan:
    local = frozenset(networks((*_LOOPBACK, *addresses)))
    return NodePlan(local, local)


def _copies(golden: str) -> Iterator[tuple[int, str]]:
    """A golden text of every case, several times, each as that of Services of its own."""
    for number, case in enumerate(situations() * _COPIES, start=1):
        text = (CASES / case / golden).read_text()
        for what, instead in (
            ("default/", f"past-{number}/"),
            ("kube-system/", f"past-system-{number}/"),
            ("10.96.0.", f"10.100.{number}."),
            ("fd00::", f"fd00:{number:x}::"),
            ("fd96::", f"fd96:{number:x}::"),
        ):
            text = text.replace(what, instead)
        yield number, text


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """The first line of each, and those below it."""
    for block in text.split("\n\n"):
        head, *lines = block.splitlines()
        yield head, lines


# iptables

_Rules = dict[tuple[str, str], list[str]]


def _add(rules: _Rules, entries: Mapping[iptables_entries.Key, iptables_entries.Entry]) -> None:
    """Jumps are in reverse, since kube-proxy prepends one after the other."""
    placed: dict[RulePosition, list[iptables_entries.Rule]] = {place: [] for place in RulePosition}
    for key, entry in entries.items():
        if isinstance(key, iptables_entries.Rule):
            assert isinstance(entry, RulePosition)
            placed[entry].append(key)
        else:
            rules.setdefault((key.table, key.name), []).extend(entry if isinstance(entry, tuple) else ())
    for rule in (
        *placed[RulePosition.FIRST][::-1],
        *placed[RulePosition.ANYWHERE],
        *placed[RulePosition.LAST],
    ):
        rules.setdefault((rule.table, rule.chain), []).append(rule.text)


def _former_rules(of: Family) -> Iterator[tuple[tuple[str, str], str]]:
    """Those of the golden texts, by table and chain."""
    for number, text in _copies("iptables.txt"):
        for head, lines in _blocks(text):
            family, _, table = head.partition(" ")
            for line in lines if family == of.value else ():
                _, chain, rule = _OF_A_SERVICE.sub(_renaming(number), line).split(" ", 2)
                if not _ABSENT.search(rule) and not rule.endswith("-j KUBE-NODEPORTS"):
                    yield (table, chain), rule


def _renaming(number: int) -> Callable[[re.Match[str]], str]:
    """Hashes are of the names of Services, and each copy has others."""

    def renamed(found: re.Match[str]) -> str:
        digest = hashlib.sha256(f"{number} {found[0]}".encode()).digest()
        return found[0][:-16] + base64.b32encode(digest).decode()[:16]

    return renamed


def _table(table: str, rules: _Rules) -> Iterator[str]:
    own = {name: texts for (where, name), texts in rules.items() if where == table}
    yield f"*{table}"
    for name in own:
        if name.startswith("KUBE-"):
            yield f":{name} - [0:0]"
    for name, texts in own.items():
        yield from (f"-A {name} {text}" for text in texts)
    yield "COMMIT"


# nftables


class _Objects:
    """Of both tables, each once: the golden texts have some in common."""

    def __init__(self) -> None:
        self._containers: dict[str, None] = {}
        self._chains: dict[str, tuple[str, list[str]]] = {}
        self._elements: dict[str, str] = {}

    def add(self, key: Key, entry: Entry) -> None:
        of = nft_family(key.family)
        if isinstance(key, Element):
            assert isinstance(entry, ElementEntry)
            self._element(of, key.container, element_text(key, entry))
        elif isinstance(entry, ChainEntry):
            self._chains[f"{of} {TABLE} {key.name}"] = entry.hook, list(entry.rules)
        else:
            self._container(of, key.kind, key.name, f"{{ {entry} }}")

    def take(self, of: str, lines: list[str]) -> None:
        """A block of a golden text."""
        rules: list[str] = []
        for line in lines:
            word, _, rest = line.strip().partition(" ")
            name, _, body = rest.partition(" ")
            if line.startswith("    "):
                rules.append(line.strip())
            elif word == "chain":
                rules = []
                self._chains[f"{of} {TABLE} {name}"] = "", rules
            elif word == "element":
                self._element(of, name, body.removeprefix("{ ").removesuffix(" }"))
            else:
                self._container(of, word, name, body)

    def text(self) -> str:
        """What is referred to comes before what refers to it."""
        lines = [f"add table {of} {TABLE}" for of in _FAMILIES.values()]
        lines += self._containers
        for name, (hook, _) in self._chains.items():
            lines.append(f"add chain {name} {{ {hook} }}" if hook else f"add chain {name}")
        lines += [f"add rule {name} {rule}" for name, (_, rules) in self._chains.items() for rule in rules]
        lines += self._elements.values()
        return "\n".join(lines) + "\n"

    def _container(self, of: str, kind: str, name: str, declaration: str) -> None:
        self._containers[f"add {kind} {of} {TABLE} {name} {declaration}"] = None

    def _element(self, of: str, container: str, text: str) -> None:
        key = text.partition(" :")[0].partition(" comment ")[0]
        line = f"add element {of} {TABLE} {container} {{ {text} }}"
        self._elements.setdefault(f"{of} {container} {key}", line)
