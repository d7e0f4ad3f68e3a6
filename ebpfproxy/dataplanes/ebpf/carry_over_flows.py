"""Flows of a former layout's packet path: its `flows` into the present ones, ids translated.

There may be hundreds of thousands of entries, of which most do not change from one copy to the next. So
of each only a hash is remembered, of all but when it was last seen: some 70 bytes, as long as this lives.
"""

import contextlib
import struct
from array import array
from collections.abc import Iterator

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.carry_over_ids import Translation
from ebpfproxy.dataplanes.ebpf.flow_state import Flow, columns, same_flow
from ebpfproxy.dataplanes.ebpf.flow_state import keys as keys_of
from ebpfproxy.errors import AlreadyExists, KernelError, NotFound
from ebpfproxy.kernel.bpf import BUSY, Map, errno_of

_BATCH = 1024  # entries: a call takes half a millisecond
_NOEXIST, _EXIST = 1, 2  # BPF_NOEXIST, BPF_EXIST
_KEY, _VALUE = abi.FLOW_KEY.size, abi.FLOW.size
_IDS = struct.Struct("=II")  # service_id and endpoint_id
_IDS_AT = abi.FLOW.offset("service_id")
_U16 = struct.Struct("=H")
_FLAGS_AT = abi.FLOW.offset("flags")
_SEEN_AT = abi.FLOW.offset("last_seen")  # the last field
_SEEN = columns(last_seen="Q")
_FLAGS = columns(flags="H")
_ENDPOINT = columns(endpoint="16s", endpoint_port="H", flags="H", service_id="I")

_Entry = tuple[int, bytes, bytes]  # its hash, its key and its value


class CarriedFlows:
    """Remembers what it has seen, so that each copy is of what changed since the last."""

    def __init__(self, former: Map, present: Map) -> None:
        self._former = former
        self._present = present
        self._seen: set[int] = set()

    def copy(self, ids: Translation) -> int:
        """How many entries were written."""
        written = self._walk(ids)
        if written > _BATCH:
            written += self._walk(ids)  # what came meanwhile would come late after the next step, too
        return written

    def _walk(self, ids: Translation) -> int:
        empty = next(self._present.items(), None) is None  # nobody writes there yet
        oldest = self._oldest()
        written = 0
        for keys, values in self._former.batches(_BATCH):
            entries = [
                (hash_, key, _translated(value, ids))
                for hash_, key, value in _entries(keys, values)
                if hash_ not in self._seen and _SEEN.unpack(value)[0] >= oldest
            ]
            if empty:
                self._present.update_all([(key, value) for _, key, value in entries])
                written += len(entries)
            else:
                written += sum(self._write(key, value) for _, key, value in entries)
            self._seen.update(hash_ for hash_, _, _ in entries)
        return written

    def _oldest(self) -> int:
        """Where the present map has less room, the newest fit: when the first of them was last seen."""
        room = self._present.shape.max_entries
        if self._former.shape.max_entries <= room:
            return 0
        seen = array("Q")
        for _, values in self._former.batches(_BATCH):
            seen.extend(number for (number,) in _SEEN.iter_unpack(values))
        return sorted(seen)[-room] if len(seen) > room else 0

    def _write(self, key: bytes, value: bytes) -> bool:
        """Whether this was written: what the present programs know of the flow is newer, and stays."""
        try:
            return self._insert(key, value) or self._complete(key, value)
        except KernelError as failure:
            if errno_of(failure) not in BUSY:
                raise
            return False  # this entry alone: a flow's other entries restore it

    def _insert(self, key: bytes, value: bytes) -> bool:
        with contextlib.suppress(AlreadyExists):
            self._present.update(key, value, _NOEXIST)
            return True
        return False

    def _complete(self, key: bytes, value: bytes) -> bool:
        """What a flow has come to since it was copied, where the present programs have not seen it since.

        That is the same second for them, in which they only add flags.
        """
        found = self._present.lookup(key)
        former, present = Flow.unpack(value), Flow.unpack(found or bytes(_VALUE))
        if present.last_seen > former.last_seen or not same_flow(former, present):
            return False
        newer = present._replace(flags=former.flags | present.flags, last_seen=former.last_seen)
        if not present.masquerade_port:
            newer = newer._replace(masquerade=former.masquerade, masquerade_port=former.masquerade_port)
        if newer == present._replace(last_seen=newer.last_seen):
            return False
        self._present.update(key, newer.pack(), _EXIST)
        return True

    def adopt(self, ids: Translation) -> int:
        """Give ids to what the present programs brought over by themselves and do no more; to how many
        entries. Where the former map has forgotten the flow, both are 0."""
        return sum(
            self._adopt(keys[at * _KEY : (at + 1) * _KEY], ids)
            for keys, values in self._present.batches(_BATCH)
            for at, (flags,) in enumerate(_FLAGS.iter_unpack(values))
            if flags & abi.FLOW_BROUGHT
        )

    def _adopt(self, key: bytes, ids: Translation) -> bool:
        flow = Flow.unpack(self._present.lookup(key) or bytes(_VALUE))
        if not flow.flags & abi.FLOW_BROUGHT:
            return False
        known = (Flow.unpack(self._former.lookup(each) or bytes(_VALUE)) for each in keys_of(flow).values())
        service = next((former.service_id for former in known if same_flow(former, flow)), 0)
        service, endpoint = ids.of(service, flow.endpoint, flow.endpoint_port)
        adopted = flow._replace(flags=flow.flags & ~abi.FLOW_BROUGHT)
        try:
            self._present.update(
                key, adopted._replace(service_id=service, endpoint_id=endpoint).pack(), _EXIST
            )
        except NotFound:
            return False
        return True


def _entries(keys: bytes, values: bytes) -> Iterator[_Entry]:
    """Of a batch."""
    for at in range(len(keys) // _KEY):
        key = keys[at * _KEY : (at + 1) * _KEY]
        value = values[at * _VALUE : (at + 1) * _VALUE]
        yield hash(key + value[:_SEEN_AT]), key, value


def _translated(value: bytes, ids: Translation) -> bytes:
    flow = bytearray(value)
    address, port, flags, service = _ENDPOINT.unpack(value)
    _U16.pack_into(flow, _FLAGS_AT, flags & ~abi.FLOW_BROUGHT)
    _IDS.pack_into(flow, _IDS_AT, *ids.of(service, address, port))
    return bytes(flow)
