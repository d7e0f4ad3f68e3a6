"""Removes what mode nftables left. kube-proxy uses the same table in each family."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence

from ebpfproxy.backends.nftables.entries import TABLE, endpoint_maps
from ebpfproxy.backends.nftables.flowtable_objects import CHAINS, FLOWTABLE, SETS
from ebpfproxy.backends.nftables.localhost_node_ports import REJECTED_NODE_PORTS, REJECTING_CHAINS
from ebpfproxy.backends.nftables.node_objects import (
    AFFINITY,
    EQUAL_BYTES,
    MARK_FOR_MASQUERADE,
    NAT_CHAINS,
    NODE_PORT_NETWORKS,
)
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.nft import flowtables, messages, nft
from ebpfproxy.linux.nft.messages import Operation, Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.replies import ListedChain
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.rule_expressions import SetNames
from ebpfproxy.model.address import Family

_FAMILIES = {"ip": Family.IPV4, "ip6": Family.IPV6}

_OWN_SETS = frozenset({AFFINITY, EQUAL_BYTES, NODE_PORT_NETWORKS, REJECTED_NODE_PORTS})
"""The sets, besides the maps of endpoints, that kube-proxy does not have."""
_OWN_CHAINS = frozenset({MARK_FOR_MASQUERADE, *NAT_CHAINS, *REJECTING_CHAINS.values()})
"""The chains that kube-proxy does not have. `MARK_FOR_MASQUERADE` is one of kube-proxy before 1.34, which
creates it again."""

_OF_KUBE_PROXY = {name: name.removesuffix("-first") for name in NAT_CHAINS}
"""The base chains of kube-proxy at the same hooks."""

_CONNTRACK_RULE = Rule("ct state new return")
"""A rule without effect that requests connection tracking."""


def remove(dry_run: bool = False) -> list[str]:
    """Remove the tables at once and return one line for each. Empty if there is none, or no nf_tables.

    Translated connections end unless other NAT exists: see `drain`. Raises KernelError.
    """
    removed = []
    with Session() as session:
        for table in _found(session):
            removed.append(_described(session, table, session.chains(table)))
            if not dry_run:
                _commit(session, table, [messages.delete_table(table)])
    return removed


def remove_beside_kube_proxy(dry_run: bool = False) -> list[str]:
    """Remove from the tables what kube-proxy does not use, and so would keep after it has taken them over.
    Return one line for each object. Raises KernelError.

    kube-proxy removes chains of Services and sets `affinity-`, and flushes its own chains (syncProxyRules in
    pkg/proxy/nftables/proxier.go). The kernel rejects the removal of what a rule still uses, for example
    because kube-proxy has not synced yet; this stays. So do base chains until kube-proxy has created its own.
    """
    removed = []
    with Session() as session:
        change = session.attempt if dry_run else session.commit
        for table in _found(session):
            family = _FAMILIES[table.family]
            own = _OWN_SETS | {each.name for each in endpoint_maps(family)}
            sets = [each.name for each in session.sets(table) if each.name in own]
            existing = {each.name for each in session.chains(table)}
            chains = [
                each for each in sorted(existing & _OWN_CHAINS) if _OF_KUBE_PROXY.get(each, each) in existing
            ]
            for name, operations in (
                *((f"set or map {name}", [messages.delete_set(table, name)]) for name in sets),
                *((f"chain {name}", [messages.delete_chain(table, name)]) for name in chains),
                (f"flowtable {FLOWTABLE}", list(_flowtable_removal(session, table, existing))),
            ):
                if operations and not change(operations):
                    removed.append(f"nftables table {table}: {name}")
    return removed


def _flowtable_removal(session: Session, table: Table, chains: Collection[str]) -> Iterator[Operation]:
    """Yield the operations that remove the flowtable, with the chains and sets that exist for it."""
    yield from (messages.delete_chain(table, name) for name in CHAINS if name in chains)
    sets = {each.name for each in session.sets(table)}
    yield from (messages.delete_set(table, name) for name in SETS if name in sets)
    found = (each.name for each in session.flowtables(table))
    yield from (flowtables.delete_flowtable(table, name) for name in found if name == FLOWTABLE)


def drain(translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """Remove the tables in two steps, to keep open connections. Return the removed objects, and whether
    another call is required.

    Everything that affects new connections is removed at once. But without any nat chain, and without any
    rule that requests connection tracking, the kernel unregisters its hooks and discards all NAT state
    (nf_nat_unregister_fn(), nf_ct_netns_put()). So one chain without effect stays, in a table of the same
    name, as long as `translates(family)` returns that translated connections need it. `translates` is called
    each time.

    Raises KernelError.
    """
    removed: list[str] = []
    again = False
    with Session() as session:
        for table in _found(session):
            needed = functools.partial(translates, _FAMILIES[table.family])
            done, needs_next_call = _step(session, table, needed)
            removed += done
            again = again or needs_next_call
    return removed, again


def _step(session: Session, table: Table, translates: Callable[[], bool]) -> tuple[list[str], bool]:
    chains = session.chains(table)
    described = _described(session, table, chains)
    nat = [chain for chain in chains if chain.hook and chain.hook.type == "nat"]
    if not nat or not translates():
        _commit(session, table, [messages.delete_table(table)])
        return [described], False
    if len(chains) == 1 and not session.sets(table) and _rules(session, table) == [_CONNTRACK_RULE]:
        return [], True
    # In one transaction, the kernel registers the hooks of the new chain before it unregisters the old ones.
    operations = [
        messages.delete_table(table),
        messages.add_table(table),
        messages.add_chain(table, nat[0].name, nat[0].hook),
        *messages.add_rule(table, nat[0].name, _CONNTRACK_RULE, SetNames()),
    ]
    _commit(session, table, operations)
    return [f"{described}, except one chain that open connections need"], True


def _found(session: Session) -> list[Table]:
    try:
        return [table for table in session.tables() if table.name == TABLE]
    except KernelError as failure:
        if nft.has_none(failure):
            return []
        raise


def _described(session: Session, table: Table, chains: Sequence[ListedChain]) -> str:
    hooked = sum(chain.hook is not None for chain in chains)
    sets = sum(not each.is_anonymous for each in session.sets(table))
    return f"nftables table {table}: {sets} sets and maps, {len(chains)} chains, {hooked} of them base chains"


def _rules(session: Session, table: Table) -> list[Rule]:
    return [each.rule for each in session.rules(table)]


def _commit(session: Session, table: Table, operations: Sequence[Operation]) -> None:
    """Raises Rejected, and NotFound if another program has removed the table since."""
    for each in session.commit(operations):
        raise nft.failure(f"nftables: cannot remove table {table}", each.errno, each.reason)
