"""What plans become in our tables. Pure."""

from collections.abc import Iterable

from ebpfproxy.backends.nftables.entries import Entry, Key
from ebpfproxy.backends.nftables.node_objects import node_objects
from ebpfproxy.backends.nftables.service_objects import service_objects
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan


def render(
    plans: Iterable[ServicePortPlan],
    node: NodePlan | None,
    settings: NftablesSettings,
    families: Iterable[Family] = tuple(Family),
) -> dict[Key, Entry]:
    """The entries that the plans ask for; with a `node`, those of the node, too. Only of `families`.

    Plans have an entry in common, equal in all, where they are ports of one Service: the element of its
    ClusterIP in `cluster-ips`; and where they have an endpoint of this node in common: what that sends to
    itself, in `hairpin-connections`.
    """
    served = frozenset(families)
    entries: dict[Key, Entry] = {}
    for plan in plans:
        if plan.family in served:
            entries.update(service_objects(plan))
    if node is not None:
        for of in Family:
            if of in served:
                entries.update(node_objects(node, of, settings))
    return entries
