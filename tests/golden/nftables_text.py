"""Entries of backend nftables as text: those of ServicePorts, and those that the plan of the node adds."""

from collections.abc import Iterator, Mapping

from ebpfproxy.backends.nftables.backend import render
from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Endpoints,
    Entry,
    Flowtable,
    FlowtableDevice,
    Key,
    Map,
    Set,
    nft_family,
)
from ebpfproxy.backends.nftables.node_objects import node_objects
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan
from tests.golden.situation import Situation, with_pods_detected_by_cidr
from tests.support.nft_listing import element_text, endpoints_of

SETTINGS = NftablesSettings()


def entries_of(situation: Situation) -> dict[Key, Entry]:
    """All entries of both families."""
    situation = with_pods_detected_by_cidr(situation)
    return render(situation.plans, situation.node_plan, SETTINGS)


def nftables_text(situation: Situation) -> str:
    """A block for each ServicePort, and one for each table, without the entries of an empty `NodePlan`."""
    planned = with_pods_detected_by_cidr(situation)
    blocks = []
    for plan in planned.plans:
        head = f"{plan.name} {plan.name.protocol.name} {plan.family.value}"
        blocks.append("\n".join([head, *_lines(render((plan,), None, SETTINGS))]))
    for of in Family:
        usual = dict(node_objects(NodePlan(), of, SETTINGS))
        own = dict(node_objects(planned.node_plan, of, SETTINGS))
        special = {key: entry for key, entry in own.items() if usual.get(key) != entry}
        if special:
            blocks.append("\n".join([f"table {nft_family(of)}", *_lines(special)]))
    return "\n\n".join(blocks or ["no objects"]) + "\n"


def _lines(entries: Mapping[Key, Entry]) -> Iterator[str]:
    for key, entry in entries.items():
        if isinstance(key, Element):
            assert isinstance(entry, ElementEntry)
            yield f"  element {key.container} {{ {element_text(key, entry)} }}"
        elif isinstance(key, Endpoints):
            yield f"  endpoints {key.container}: {', '.join(endpoints_of(key, entry))}"
        elif isinstance(key, FlowtableDevice):
            yield f"  device {key.device} of flowtable {key.flowtable}"
        elif isinstance(key, Chain):
            assert isinstance(entry, ChainEntry)
            yield f"  chain {key.name}"
            yield from (f"    {rule}" for rule in entry.rules)
        elif isinstance(key, Set | Map | Flowtable):
            assert isinstance(entry, str)
            yield f"  {key.kind} {key.name} {{ {entry} }}"
