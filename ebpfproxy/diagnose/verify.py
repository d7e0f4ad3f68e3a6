"""Compares the kernel with the desired state from outside the agent, in any mode. It changes nothing."""

import time
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.backends.difference import Difference, compare
from ebpfproxy.backends.mode import Inspection, Mode
from ebpfproxy.config import Config
from ebpfproxy.config.derived import least_interval
from ebpfproxy.diagnose.cluster import Cluster, read_cluster
from ebpfproxy.diagnose.desired import Desired, desired

_ROUNDS = 4
_SETTLED = 1.0  # seconds for a sync, besides the shortest interval between two syncs


class Verified(NamedTuple):
    """The result of a comparison.

    - `differences`: sorted.
    - `compared`: the number of desired entries.
    - `cluster`, `desired`: of the last comparison.
    """

    differences: tuple[Difference, ...]
    compared: int
    cluster: Cluster
    desired: Desired


def verify(
    mode: Mode,
    config: Config,
    read: Callable[[Config], Cluster] = read_cluster,
    sleep: Callable[[float], object] = time.sleep,
) -> Verified:
    """Compare the entries of a mode in the kernel with those that the state of the cluster requires.

    The cluster and the kernel change meanwhile. So after a difference, both are read again when the agent had
    time for a sync, up to three times. The result has the differences that all comparisons found. Raises
    EbpfProxyError if the cluster or the kernel cannot be read.
    """
    inspection = mode.inspect(config)
    try:
        result = _compared(inspection, read(config))
        for _ in range(_ROUNDS - 1):
            if not result.differences:
                break
            sleep(least_interval(config, mode.name) + _SETTLED)
            again = _compared(inspection, read(config))
            lasting = {(each.key, each.state) for each in result.differences}
            kept = tuple(each for each in again.differences if (each.key, each.state) in lasting)
            result = again._replace(differences=kept)
        return result
    finally:
        inspection.close()


def _compared(inspection: Inspection, cluster: Cluster) -> Verified:
    """The kernel is read after the cluster: a change that the agent has applied meanwhile is a difference."""
    wanted = desired(cluster.state, inspection)
    found = compare(inspection.read(), wanted.entries, inspection.shown)
    further = inspection.further()
    return Verified(tuple(sorted({*found, *further})), len(wanted.entries), cluster, wanted)
