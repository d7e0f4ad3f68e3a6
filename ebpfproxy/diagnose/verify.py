"""Compares the kernel with the desired state from outside the agent, in any mode. It changes nothing."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from ebpfproxy.backends.difference import Difference, compare
from ebpfproxy.backends.interface import Inspection
from ebpfproxy.config import Config
from ebpfproxy.config.derived import least_interval
from ebpfproxy.diagnose.cluster import Cluster, read_cluster
from ebpfproxy.diagnose.situation import Situation, situation_of_mode

_ROUNDS = 4
_SYNC = 1.0  # seconds for a sync, besides the shortest interval between two syncs


class Inspectable(Protocol):
    """What is compared with the cluster: a `Mode`, or a saved dump of one."""

    @property
    def name(self) -> str: ...

    def inspect(self, config: Config) -> Inspection[Any, Any]: ...


class Verified(NamedTuple):
    """The result of a comparison.

    - `differences`: sorted.
    - `compared`: the number of desired entries.
    - `situation`, `desired`: the plans and the desired entries of the last comparison.
    """

    differences: tuple[Difference, ...]
    compared: int
    situation: Situation
    desired: Mapping[Any, Any]


def verify(
    mode: Inspectable,
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
        result = _compared(inspection, mode, config, read(config))
        for _ in range(_ROUNDS - 1):
            if not result.differences:
                break
            sleep(sync_seconds(config, mode.name))
            again = _compared(inspection, mode, config, read(config))
            lasting = {(each.key, each.state) for each in result.differences}
            kept = tuple(each for each in again.differences if (each.key, each.state) in lasting)
            result = again._replace(differences=kept)
        return result
    finally:
        inspection.close()


def sync_seconds(config: Config, mode: str) -> float:
    """The seconds in which a running agent applies a change of the cluster."""
    return least_interval(config, mode) + _SYNC


def _compared(
    inspection: Inspection[Any, Any], mode: Inspectable, config: Config, cluster: Cluster
) -> Verified:
    """The kernel is read after the cluster: a change that the agent has applied meanwhile is a difference."""
    situation = situation_of_mode(cluster, inspection, mode.name, config)
    entries = desired(inspection, situation)
    found = differences(inspection, entries)
    return Verified(tuple(sorted(set(found))), len(entries), situation, entries)


def desired(inspection: Inspection[Any, Any], situation: Situation) -> Mapping[Any, Any]:
    """The entries that the kernel should have: those of all plans and of the node."""
    return inspection.render(situation.plans.values(), situation.node)


def differences(inspection: Inspection[Any, Any], entries: Mapping[Any, Any]) -> list[Difference]:
    """Read the kernel and compare it with `entries`. Raises KernelError."""
    found = compare(inspection.read(), entries, inspection.shown)
    return [*found, *inspection.further()]
