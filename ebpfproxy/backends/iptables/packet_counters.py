"""The nfacct counters of mode iptables, as in kube-proxy since 1.32 (pkg/proxy/metrics/metrics.go).

They exist as long as rules use them, also while no agent runs: metrics of a restarted agent continue.
"""

import contextlib
import time

from ebpfproxy.backends.iptables.chains import INVALID_DROPPED, LOCALHOST_NODE_PORTS
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.netlink import nfacct
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import PacketCounts

NAMES = (INVALID_DROPPED, LOCALHOST_NODE_PORTS)

_RELEASE_SECONDS = 1.0
_POLL_SECONDS = 0.02


def create() -> None:
    """Create the counters that do not exist. Raises KernelError."""
    for name in NAMES:
        nfacct.ensure(name)


def prepare(_: Family) -> None:
    """Create the counters if the kernel has nfacct, before rules are tried in a temporary network
    namespace. Without them the kernel rejects the rules. Raises Rejected.
    """
    with contextlib.suppress(Unsupported):
        create()


def read() -> PacketCounts:
    """Return the counts, in the calling thread's network namespace. Raises KernelError."""
    return PacketCounts(nfacct.packets(INVALID_DROPPED), nfacct.packets(LOCALHOST_NODE_PORTS))


def remove(rules_removed: bool, dry_run: bool = False) -> list[str]:
    """Delete the counters that no rule uses. Return a line for each; with `dry_run`, for each that exists.

    `rules_removed`: the caller has just removed rules. The kernel releases the counters of rules of
    iptables-nft a moment later (nf_tables_trans_destroy_work()). Raises KernelError.
    """
    deadline = time.monotonic() + _RELEASE_SECONDS * rules_removed
    removed = []
    for name in filter(_exists, NAMES):
        while not (gone := dry_run or nfacct.delete(name)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if gone:
            removed.append(f"nfacct counter {name}")
    return removed


def exist() -> bool:
    """Return whether all counters exist. Raises KernelError."""
    return all(map(_exists, NAMES))


def _exists(name: str) -> bool:
    """Return whether a counter exists. A kernel without nfacct has none."""
    try:
        return nfacct.packets(name) is not None
    except Unsupported:
        return False
