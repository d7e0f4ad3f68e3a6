"""The maps `tunnels` and `tunnel_endpoints`: endpoints of Services with direct server return.

An endpoint on another node has an entry in `tunnels`, by its id, if that node accepts tunneled packets. An
endpoint on this node has an entry in `tunnel_endpoints`, by its address, port and service id. Both maps have
room for all endpoints.
"""

from collections.abc import Iterable, Iterator

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.check import Written
from ebpfproxy.backends.ebpf.services.record import U32, Record
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address

_PADDED_TARGET = 2  # bytes of padding between a target and the service id
_WALKED = 512  # entries in one step

Entries = dict[bytes, bytes]


class Tunnels:
    """The entries of both maps. The caller adds entries before they are used, and removes them afterwards."""

    def __init__(self, maps: Maps) -> None:
        self._remote, self._here = maps["tunnels"], maps["tunnel_endpoints"]

    def read(self, records: Iterable[Record]) -> None:
        """Set `tunnels` of the records' entries as the maps contain it, and remove what belongs to none.

        If a record's entries are incomplete, they are removed, too. A sync adds them again.
        """
        maps = self._remote, self._here
        found = [dict(each.items()) for each in maps]
        left = [set(each) for each in found]
        for record in records:
            if not any(found):
                break
            nodes = tuple(_node(found[0].get(U32.pack(id_))) for id_ in record.ids)
            wanted = _entries(nodes, record)
            complete = all(part.items() <= have.items() for part, have in zip(wanted, found, strict=True))
            if complete and any(wanted):
                record.entry = record.entry._replace(tunnels=nodes)
                for part, rest in zip(wanted, left, strict=True):
                    rest.difference_update(part)
        for map_, keys in zip(maps, left, strict=True):
            _delete(map_, keys)

    def add(self, record: Record) -> None:
        """Write the entries of a record."""
        for map_, values in zip((self._remote, self._here), entries(record), strict=True):
            if values:
                map_.update_all(list(values.items()))

    def remove(self, old: Record, new: Record | None) -> None:
        """Remove the entries that only the `old` record has."""
        kept = entries(new) if new else ({}, {})
        for map_, before, after in zip((self._remote, self._here), entries(old), kept, strict=True):
            _delete(map_, before.keys() - after.keys())

    def check(self, written: Written) -> Iterator[bool]:
        """Yield after each step whether both maps have exactly the entries of the records."""
        version = written.version
        wanted: tuple[Entries, Entries] = ({}, {})
        for record in list(written.records.values()):
            if record.entry.tunnels:
                for all_, own in zip(wanted, entries(record), strict=True):
                    all_.update(own)
        yield True
        for map_, own in zip((self._remote, self._here), wanted, strict=True):
            found, right = 0, True
            key_size, value_size = map_.shape.key_size, map_.shape.value_size
            for keys, values in map_.batches(_WALKED):
                if written.version != version:
                    return  # left to the next check
                count = len(keys) // key_size
                found += count
                right &= all(
                    own.get(keys[at * key_size : (at + 1) * key_size])
                    == values[at * value_size : (at + 1) * value_size]
                    for at in range(count)
                )
                yield right
            yield written.version != version or found == len(own)


def entries(record: Record) -> tuple[Entries, Entries]:
    """The entries of a record in `tunnels` and `tunnel_endpoints`."""
    return _entries(record.entry.tunnels, record)


def _entries(tunnels: tuple[Address | None, ...], record: Record) -> tuple[Entries, Entries]:
    remote: Entries = {}
    here: Entries = {}
    if not tunnels:
        return remote, here
    endpoints = record.entry.endpoints
    for node, id_, flags, target in zip(
        tunnels, record.ids, endpoints.flags(), endpoints.targets(), strict=True
    ):
        if node:
            remote[U32.pack(id_)] = abi.TUNNEL.pack(node)
        elif flags & abi.ENDPOINT_ON_NODE:
            here[target + bytes(_PADDED_TARGET) + U32.pack(record.id)] = U32.pack(id_)
    return remote, here


def _node(value: bytes | None) -> Address | None:
    return Address(value) if value else None


def _delete(map_: Map, keys: Iterable[bytes]) -> None:
    for key in keys:
        map_.delete(key)
