"""One ServicePort in the maps, and the packing of its keys and values."""

import dataclasses
import struct
from socket import htons

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import FrontendEntry, ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.errors import TableFull
from ebpfproxy.model.address import Address, Family

AddressPort = tuple[Address, int]
"""An address and a port (host order)."""
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
    ids: tuple[int, ...] = ()
    cluster: Range = NOTHING
    local: Range = NOTHING
    services: dict[bytes, bytes] = dataclasses.field(default_factory=dict)

    def places(self) -> dict[AddressPort, int]:
        """The id of each endpoint, by its address and port."""
        return {
            (address, port): id_
            for (address, port, _), id_ in zip(self.entry.endpoints, self.ids, strict=True)
        }


def service_key(frontend: FrontendEntry) -> bytes:
    return abi.SERVICE_KEY.pack(frontend.address, htons(frontend.port), frontend.protocol, 0)


def service_value(frontend: FrontendEntry, of: Record) -> bytes:
    flags = frontend.flags
    internal = of.local if flags & abi.SERVICE_INTERNAL_LOCAL else of.cluster
    external = of.local if flags & abi.SERVICE_EXTERNAL_LOCAL else of.cluster
    return abi.SERVICE.pack(
        abi.SLOT_RANGE.pack(*internal),
        abi.SLOT_RANGE.pack(*external),
        *(of.id, of.entry.affinity_timeout, flags, frontend.kind, 0),
    )


def name_value(key: ServicePortKey) -> bytes:
    text = key.name.encode()[: abi.CONSTANTS["SERVICE_NAME_SIZE"] - 1]
    return abi.SERVICE_NAME.pack(text, key.protocol, 4 if key.family is Family.IPV4 else 6)


def full(map_: str, key: ServicePortKey, needed: int, capacity: int) -> TableFull:
    """The error for a map without room. `needed`: the number of entries that the map would need."""
    table = {"service_names": "services"}.get(map_, map_)
    option = table.replace("_", "-")
    failure = TableFull(
        f"{key.name}: map {map_} is full: it has room for {capacity} entries, {needed} are needed",
        f"raise --ebpf-{option}-max; entries that a change has removed become free after {GRACE:g} s",
    )
    failure.table = table
    return failure
