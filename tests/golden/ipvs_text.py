"""Entries of backend ipvs as text: virtual servers as in `ipvsadm -Ln`, sets as in `ipset list`, rules as in
`iptables-save`. The address 0.0.0.0 or :: of a NodePort stands for each address in KUBE-NODE-PORT-IP.
"""

from collections.abc import Iterator, Mapping

from ebpfproxy.backends.iptables.entries import Chain, Rule
from ebpfproxy.backends.ipvs.entries import Entry, IpvsSettings, Key, Local, Member, Server, ServerEntry
from ebpfproxy.backends.ipvs.node_entries import node_entries
from ebpfproxy.backends.ipvs.service_entries import service_entries
from ebpfproxy.backends.ipvs.sets import SETS, set_name
from ebpfproxy.model.address import Family, format_address, format_endpoint
from ebpfproxy.plan.service_plan import NodePlan
from tests.golden.situation import Situation, with_pods_detected_by_cidr


def entries_of(situation: Situation, family: Family) -> dict[Key, Entry]:
    """All entries of one family; Services are in the order of their names."""
    situation = with_pods_detected_by_cidr(situation)
    settings = IpvsSettings(masquerade_all=situation.context.masquerade_all)
    entries = node_entries(situation.node_plan, family, settings)
    for plan in situation.plans:
        if plan.family is family:
            entries |= service_entries(plan, settings)
    return entries


def ipvs_text(situation: Situation) -> str:
    """A block for each family and kind of entry, without the rules that an empty `NodePlan` has."""
    blocks = []
    for family in Family:
        entries = entries_of(situation, family)
        usual = node_entries(NodePlan(), family, IpvsSettings())
        special = {key: entry for key, entry in entries.items() if usual.get(key) != entry}
        for head, lines in (
            ("virtual servers", _servers(special)),
            ("kube-ipvs0", _addresses(special)),
            ("sets", _sets(special, family)),
            ("rules", _rules(special, usual)),
        ):
            if shown := list(lines):
                blocks.append("\n".join([f"{family.value} {head}", *shown]))
    return "\n\n".join(blocks or ["nothing"]) + "\n"


def _servers(entries: Mapping[Key, Entry]) -> Iterator[str]:
    for key, entry in entries.items():
        if isinstance(key, Server) and isinstance(entry, ServerEntry):
            address, port, protocol = key.frontend
            persistent = f" persistent {entry.persistence_s}" if entry.persistence_s else ""
            yield f"{protocol.name:<4} {format_endpoint(address, port)} {entry.scheduler}{persistent}"
            for real in entry.reals:
                target = format_endpoint(real.address, real.port)
                method = real.method.name[:4].capitalize()
                yield f"  -> {target} {method} {real.weight}"


def _addresses(entries: Mapping[Key, Entry]) -> Iterator[str]:
    yield from sorted(format_address(key.address) for key in entries if isinstance(key, Local))


def _sets(entries: Mapping[Key, Entry], family: Family) -> Iterator[str]:
    for name in (set_name(base, family) for base in SETS):
        members = sorted(key.text for key in entries if isinstance(key, Member) and key.set == name)
        if members:
            yield name
            yield from (f"  {text}" for text in members)


def _rules(entries: Mapping[Key, Entry], usual: Mapping[Key, Entry]) -> Iterator[str]:
    for key, rules in entries.items():
        if isinstance(key, Chain) and isinstance(rules, tuple):
            known = usual[key]
            assert isinstance(known, tuple)
            yield from (f"-A {key.name} {text}" for text in rules if text not in known)
        elif isinstance(key, Rule):
            yield f"-A {key.chain} {key.text}"
