"""A change step by step: every single write to a map, and the outcome for clients before it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.arrays import Arrays
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, Network
from tests.kernel.service_table.samples import (
    Entries,
)
from tests.support.service_maps import FrontendKey, View, check_admitted, check_safe


@contextlib.contextmanager
def interrupted(maps: Maps, at_step: Callable[[], None]) -> Iterator[None]:
    """Call `at_step` before each single write to a map. An exception of `at_step` ends the change there."""
    with pytest.MonkeyPatch.context() as patch:
        update, delete, set_flags = Map.update, Map.delete, Arrays.set_flags
        write_endpoint, write_slots = Arrays.write_endpoint, Arrays.write_slots

        def update_all(self: Map, entries: list[tuple[bytes, bytes]]) -> None:
            for packed, value in entries:  # a batch is no transaction: programs see each entry separately
                at_step()
                update(self, packed, value)

        def update_one(self: Map, packed: bytes, value: bytes, flags: int = 0) -> None:
            at_step()
            update(self, packed, value, flags)

        def delete_one(self: Map, packed: bytes) -> bool:
            at_step()
            return delete(self, packed)

        def set_one(self: Arrays, endpoint_id: int, flags: int) -> None:
            at_step()
            set_flags(self, endpoint_id, flags)

        def write_one(self: Arrays, endpoint_id: int, row: bytes, service: int) -> None:
            at_step()
            write_endpoint(self, endpoint_id, row, service)

        def write_slot_by_slot(self: Arrays, first: int, ids: Sequence[int]) -> None:
            for slot, id_ in enumerate(ids, first):
                at_step()
                write_slots(self, slot, [id_])

        patch.setattr(Map, "update_all", update_all)
        patch.setattr(Map, "update", update_one)
        patch.setattr(Map, "delete", delete_one)
        patch.setattr(Arrays, "set_flags", set_one)
        patch.setattr(Arrays, "write_endpoint", write_one)
        patch.setattr(Arrays, "write_slots", write_slot_by_slot)
        yield


def lists_of(*states: Entries) -> dict[FrontendKey, frozenset[frozenset[tuple[Address, int]]]]:
    """By frontend: every list of endpoints that it has in one of the states."""
    found: dict[FrontendKey, set[frozenset[tuple[Address, int]]]] = {}
    for state in states:
        for each in state.values():
            for bit in (abi.ENDPOINT_CLUSTER, abi.ENDPOINT_LOCAL):
                places = frozenset(
                    (e.address, e.port)
                    for e, flags in zip(each.endpoints, each.endpoints.flags(), strict=True)
                    if flags & bit
                )
                for f in each.frontends:
                    wanted = {
                        abi.ENDPOINT_LOCAL
                        if f.flags & (abi.SERVICE_INTERNAL_LOCAL, abi.SERVICE_EXTERNAL_LOCAL)[i]
                        else abi.ENDPOINT_CLUSTER
                        for i in range(2)
                    }
                    if bit in wanted:
                        found.setdefault((f.address, f.port, f.protocol), set()).add(places)
    return {dialled: frozenset(places) for dialled, places in found.items()}


def ranges_of(*states: Entries) -> dict[FrontendKey, list[frozenset[Network]]]:
    """By frontend: the admitted networks in each of the states in which it is restricted."""
    found: dict[FrontendKey, list[frozenset[Network]]] = {}
    for state in states:
        for each in state.values():
            for f in each.frontends:
                if f.flags & abi.SERVICE_RESTRICTED:
                    found.setdefault((f.address, f.port, f.protocol), []).append(
                        frozenset(each.source_ranges)
                    )
    return found


@contextlib.contextmanager
def watched(maps: Maps, *states: Entries) -> Iterator[list[set[FrontendKey]]]:
    """Check the outcome for clients before each write. Yields the existing frontends before each write."""
    allowed, admitted, seen = lists_of(*states), ranges_of(*states), list[set[FrontendKey]]()

    def look() -> None:
        check_safe(maps, allowed)
        check_admitted(maps, admitted)
        seen.append(set(View(maps).services))

    with interrupted(maps, look):
        yield seen
    look()
