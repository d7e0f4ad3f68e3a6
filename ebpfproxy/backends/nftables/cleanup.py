"""Taking away what this mode left: ours and kube-proxy's own, the same table of each family."""

import functools
from collections.abc import Callable, Sequence

from ebpfproxy.backends.nftables.entries import TABLE
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.nft import messages, nft, replies
from ebpfproxy.linux.nft.compile import compile_rule
from ebpfproxy.linux.nft.decompile import rule_text
from ebpfproxy.linux.nft.messages import Operation, SetNames, Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.replies import ListedChain
from ebpfproxy.model.address import Family

_FAMILIES = {"ip": Family.IPV4, "ip6": Family.IPV6}

_HOLDING = "ct state new return"
"""A rule that does nothing, and asks for connection tracking."""


def remove(dry_run: bool = False) -> list[str]:
    """All of it, at once; what it was, a line each. Empty where nothing is there, or no nf_tables either.

    Connections that were translated end where nothing else has the kernel translate: see `drain`.

    Raises KernelError.
    """
    removed = []
    with Session() as session:
        for table in _found(session):
            removed.append(_described(session, table, session.chains(table)))
            if not dry_run:
                _commit(session, table, [messages.delete_table(table)])
    return removed


def drain(translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """In two steps, so that open connections continue; what was removed, and whether another step is to come.

    What acts on new connections goes at once. But without any nat chain, and without any rule that asks for
    connection tracking, the kernel lets go of its hooks, and of the connections that it has translated so far
    (nf_nat_unregister_fn(), nf_ct_netns_put()). So a chain that does nothing stays, in a table of that name,
    in a family and as long as `translates` says that anything is translated there that needs it. It is asked
    at each call.

    Raises KernelError.
    """
    removed: list[str] = []
    left = False
    with Session() as session:
        for table in _found(session):
            needed = functools.partial(translates, _FAMILIES[table.family])
            done, stays = _step(session, table, needed)
            removed += done
            left = left or stays
    return removed, left


def _step(session: Session, table: Table, translates: Callable[[], bool]) -> tuple[list[str], bool]:
    chains = session.chains(table)
    described = _described(session, table, chains)
    nat = [chain for chain in chains if chain.hook and chain.hook.type == "nat"]
    if not nat or not translates():
        _commit(session, table, [messages.delete_table(table)])
        return [described], False
    if len(chains) == 1 and not session.sets(table) and _rules(session, table, nat[0]) == [_HOLDING]:
        return [], True
    # In one transaction: the kernel takes hold for the new chain before it lets go of what the old ones had.
    again = [
        messages.delete_table(table),
        messages.add_table(table),
        messages.add_chain(table, nat[0].name, nat[0].hook),
        *messages.add_rule(table, nat[0].name, compile_rule(_HOLDING, table.family), SetNames()),
    ]
    _commit(session, table, again)
    return [f"{described}, but for one that the open connections need"], True


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


def _rules(session: Session, table: Table, chain: ListedChain) -> list[str]:
    reported = session.rules(table, chain.name)
    return [rule_text(replies.read_rule(each, lambda name: None), table.family) for each in reported]


def _commit(session: Session, table: Table, operations: Sequence[Operation]) -> None:
    """Raises NotFound where another program has removed it meanwhile, and Rejected."""
    for each in session.commit(operations):
        raise nft.failure(f"nftables: table {table} cannot be removed", each.errno, each.reason)
