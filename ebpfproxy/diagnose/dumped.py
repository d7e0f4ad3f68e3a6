"""A saved dump of mode ebpf in place of the kernel, for the comparisons of `verify` and `changes`.

It has the Services and the devices. The networks of the node cannot be compared: what they should be depends
on the machine.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from ebpfproxy.backends.difference import DIFFERENT, MISSING, UNEXPECTED, Difference
from ebpfproxy.backends.ebpf import entries
from ebpfproxy.backends.ebpf.entries import EGRESS, INGRESS, Entry, Key
from ebpfproxy.backends.ebpf.inspect import inspection
from ebpfproxy.backends.ebpf.inspect.device_view import DeviceRow
from ebpfproxy.backends.ebpf.inspect.saved import SAVE, SavedView
from ebpfproxy.backends.interface import Inspection
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.diagnose.cluster import read_cluster, without_machine
from ebpfproxy.diagnose.explain.from_tables import LOOPBACK_DEVICE, situation_of
from ebpfproxy.diagnose.explain.origin import EBPF
from ebpfproxy.diagnose.verify import Verified, verify
from ebpfproxy.errors import ConfigError
from ebpfproxy.plan.service_plan import NodePlan, PlannedEndpoints, ServicePortPlan


class DumpedMode:
    """Mode ebpf as a saved dump has it. Raises ConfigError if filters left rows out."""

    name = EBPF

    def __init__(self, view: SavedView) -> None:
        if view.header.filters:
            filters = " ".join(view.header.filters)
            raise ConfigError(
                f"cannot compare a part of the maps: the dump was saved with {filters}",
                f"save all of it with `{SAVE}`",
            )
        self._view = view

    def inspect(self, config: Config) -> "DumpInspection":
        return DumpInspection(self._view, config)

    def verify(self, config: Config) -> Verified:
        """Compare the dump with the cluster, for the node of the dump. Nothing of this machine is used.

        Raises EbpfProxyError if the cluster cannot be read, or the dump is incomplete.
        """
        name = config.hostname_override or self._view.header.node
        cluster = without_machine(read_cluster(dataclasses.replace(config, hostname_override=name)))
        return verify(self, config, lambda config: cluster, lambda seconds: None)


class DumpInspection(Inspection[Key, Entry]):
    """The content of a dump."""

    is_live = False

    def __init__(self, view: SavedView, config: Config) -> None:
        name = config.hostname_override or view.header.node
        self.context = plan_context(dataclasses.replace(config, hostname_override=name), EBPF)
        self._view = view

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        return entries.render(map(_as_dumped, plans), None, ())

    def read(self) -> dict[Key, Entry]:
        return self.render(situation_of(self._view, self.context.node_name).plans.values(), None)

    def shown(self, key: Any, entry: Any) -> Any:
        return inspection.shown(entry)

    def further(self) -> list[Difference]:
        return [each for row in self._view.devices() for each in _of_device(row)]

    def close(self) -> None:
        """Nothing was opened."""


def _as_dumped(plan: ServicePortPlan) -> ServicePortPlan:
    """A dump does not distinguish an unknown node of an endpoint from another node."""
    places = [each._replace(on_node=bool(each.on_node)) for each in plan.endpoints]
    return dataclasses.replace(plan, endpoints=PlannedEndpoints(places))


def _of_device(row: DeviceRow) -> Iterator[Difference]:
    if row.orphaned:
        yield Difference(f"device {row.device} {row.ifindex}", UNEXPECTED, row.orphaned)
        return
    sides = (EGRESS,) if row.device == LOOPBACK_DEVICE else (INGRESS, EGRESS)
    for side in sides:
        if not getattr(row, side):
            yield Difference(f"device {row.device} {side}", MISSING)
    for each in row.before:
        side, _, other = each.partition(": ")
        yield Difference(f"device {row.device} {side}", DIFFERENT, f"runs after {other}")
