"""One ServicePort in the maps, and the packing of its keys and values."""

import dataclasses
import struct
from array import array
from socket import htons

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import FrontendEntry, ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.services.slot_lists import SlotList, Table, places, slot_list
from ebpfproxy.model.address import Family

Range = tuple[int, int]
"""A range of slots: the first one, and their number."""

NOTHING: Range = (0, 0)
U32 = struct.Struct("=I")


@dataclasses.dataclass(slots=True)
class Record:
    """What the maps contain for one ServicePort.

    `ids` are those of `entry.endpoints`, in the same order. `cluster` and `local` are ranges of slots.
    `services` has packed keys and values.
    """

    id: int
    entry: ServicePortEntry
    ids: "array[int]" = dataclasses.field(default_factory=lambda: array("I"))
    cluster: Range = NOTHING
    local: Range = NOTHING
    services: dict[bytes, bytes] = dataclasses.field(default_factory=dict)

    def ids_by_target(self) -> dict[bytes, int]:
        """The id of each endpoint, by its address and port (`PlannedEndpoints.targets`)."""
        return dict(zip(self.entry.endpoints.targets(), self.ids, strict=True))

    def slots(self, flag: int, table: Table | None = None) -> SlotList:
        """The list of the endpoints with this flag. `table`: see `slot_list`."""
        return slot_list(self.entry, self.ids, flag, table)

    def places(self, range_: Range) -> int:
        """The number of slots that one of the ranges occupies."""
        return places(range_[1], self.entry.algorithm)


def service_key(frontend: FrontendEntry) -> bytes:
    return abi.SERVICE_KEY.pack(frontend.address, htons(frontend.port), frontend.protocol, 0)


def service_value(frontend: FrontendEntry, of: Record) -> bytes:
    flags = frontend.flags
    internal = of.local if flags & abi.SERVICE_INTERNAL_LOCAL else of.cluster
    external = of.local if flags & abi.SERVICE_EXTERNAL_LOCAL else of.cluster
    return abi.SERVICE.pack(
        abi.SLOT_RANGE.pack(*internal),
        abi.SLOT_RANGE.pack(*external),
        *(of.id, of.entry.affinity_timeout, flags, frontend.kind, of.entry.algorithm, of.entry.slow_start),
    )


def name_value(key: ServicePortKey) -> bytes:
    text = key.name.encode()[: abi.CONSTANTS["SERVICE_NAME_SIZE"] - 1]
    return abi.SERVICE_NAME.pack(text, key.protocol, 4 if key.family is Family.IPV4 else 6)
