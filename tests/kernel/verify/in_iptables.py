"""Changes of the tables of mode iptables, by iptables-legacy(8)."""

import shlex
import subprocess
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.backends.iptables.entries import chains_of
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import ToolBackend
from ebpfproxy.model.address import Family
from tests.kernel.verify.node import Node

_TOOLS = {Family.IPV4: "iptables-legacy", Family.IPV6: "ip6tables-legacy"}


class _Place(NamedTuple):
    """A rule: its chain, its number from 1 on, and its text."""

    family: Family
    table: str
    chain: str
    number: int
    text: str


_TABLES = ("filter", "nat")
"""Those of which the agent owns every rule of its chains."""


def _rule(node: Node, *prefixes: str, containing: str = "") -> _Place:
    """A rule of a chain whose name starts with one of these. `containing`: a part of the rule's text."""
    found = []
    for family in Family:
        tool = iptables.find(family, ToolBackend.LEGACY)
        for (table, name), rules in chains_of(tool.save()).items():
            if table in _TABLES and name.startswith(prefixes):
                found += [_Place(family, table, name, n, text) for n, text in enumerate(rules, 1)]
    return node.random.choice([each for each in found if containing in each.text])


def _run(place: _Place, *arguments: str) -> None:
    command = [_TOOLS[place.family], "-w", "-t", place.table, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def _jump(node: Node) -> _Place:
    chains = ("PREROUTING", "OUTPUT", "POSTROUTING", "INPUT", "FORWARD")
    return _rule(node, *chains, containing="-j KUBE-")


def delete_rule(node: Node) -> str:
    place = _rule(node, "KUBE-")
    _run(place, "-D", place.chain, str(place.number))
    return place.chain


def insert_rule(node: Node) -> str:
    place = _rule(node, "KUBE-SVC-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-SERVICES", "KUBE-NODEPORTS")
    number = node.random.randrange(1, place.number + 1)
    _run(place, "-I", place.chain, str(number), "-m", "mark", "--mark", "0x77", "-j", "ACCEPT")
    return place.chain


def replace_rule(node: Node) -> str:
    place = _rule(node, "KUBE-SVC-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-SERVICES")
    _run(place, "-R", place.chain, str(place.number), "-m", "mark", "--mark", "0x78", "-j", "RETURN")
    return place.chain


def flush_chain(node: Node) -> str:
    place = _rule(node, "KUBE-")
    _run(place, "-F", place.chain)
    return place.chain


def delete_jump(node: Node) -> str:
    place = _jump(node)
    _run(place, "-D", place.chain, str(place.number))
    return place.text


def repeat_jump(node: Node) -> str:
    """The same rule twice in a built-in chain."""
    place = _jump(node)
    _run(place, "-A", place.chain, *shlex.split(place.text))
    return place.text


def add_jump(node: Node) -> str:
    place = _jump(node)
    target = place.text.rpartition(" ")[2]
    _run(place, "-I", place.chain, "-m", "mark", "--mark", "0x79", "-j", target)
    return "--mark 0x79"


def add_chain(node: Node) -> str:
    place = _rule(node, "KUBE-SVC-")
    name = f"KUBE-SVC-{node.random.randrange(10**6)}"
    _run(place, "-N", name)
    return name


def repeat_rule(node: Node) -> str:
    place = _rule(node, "KUBE-SERVICES", "KUBE-NODEPORTS")
    _run(place, "-I", place.chain, *shlex.split(place.text))
    return place.text


def swap_last(node: Node) -> str:
    """The rule that must be the last of KUBE-SERVICES becomes the first."""
    place = _rule(node, "KUBE-SERVICES", containing="-j KUBE-NODEPORTS")
    _run(place, "-D", place.chain, str(place.number))
    _run(place, "-I", place.chain, *shlex.split(place.text))
    return place.text


STAY: tuple[Callable[[Node], str], ...] = (
    *(delete_rule, insert_rule, replace_rule, flush_chain, delete_jump, repeat_jump, add_jump, add_chain),
    *(repeat_rule, swap_last),
)
PASSING = ()
