"""Reads a BPF ring buffer (BPF_MAP_TYPE_RINGBUF, Linux 5.8, 457f44363a88) through its memory, without libbpf.

The kernel's memory of the map consists of pages (kernel/bpf/ringbuf.c, struct bpf_ringbuf):

    page 0   the position of the consumer; only this page is writable
    page 1   the position of the producers
    page 2   the data, mapped twice in a row, so that no record is split

Positions are bytes that only grow. A record is a header of 8 bytes and its data, together a multiple of 8
bytes. The first word of the header is the length of the data and two bits: busy (a program still writes it)
and discarded.
"""

import mmap
import struct
import threading
from collections.abc import Callable

from ebpfproxy.linux.bpf.bpf import Map, error

TYPE = 27  # BPF_MAP_TYPE_RINGBUF

_HEADER = 8  # BPF_RINGBUF_HDR_SZ, bytes
_BUSY, _DISCARDED = 1 << 31, 1 << 30  # BPF_RINGBUF_BUSY_BIT, BPF_RINGBUF_DISCARD_BIT
_LENGTH = _DISCARDED - 1
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")


class Records:
    """The records of a ring buffer with `size` bytes of data. `page` is the size of a page.

    `consumer` is the first page, `producer` all others.
    """

    def __init__(self, consumer: mmap.mmap, producer: mmap.mmap, size: int, page: int) -> None:
        self._consumer, self._producer = consumer, producer
        self._mask, self._page = size - 1, page
        self._lock = threading.Lock()

    def skip(self) -> None:
        """Discard the complete records."""
        self.read(lambda record: None)

    def read(self, receive: Callable[[bytes], None]) -> int:
        """Pass the data of each complete record to `receive`, the oldest first; return their number.

        It stops before the first record that a program still writes. Discarded records are passed over. Their
        room is free for producers after the call.
        """
        position = start = self._position(self._consumer)
        end = self._position(self._producer)
        self._order()
        ready = []  # start and length of each record
        while position < end:
            at = self._page + (position & self._mask)
            (word,) = _U32.unpack(self._producer[at : at + 4])
            if word & _BUSY:
                break
            length = word & _LENGTH
            if not word & _DISCARDED:
                ready.append((at + _HEADER, length))
            position += (length + _HEADER + 7) // 8 * 8
        self._order()
        for at, length in ready:
            receive(self._producer[at : at + length])
        if position != start:
            self._consumer[0:8] = _U64.pack(position)
        return len(ready)

    def _order(self) -> None:
        """Read what follows after what precedes. A lock contains the barrier, which Python does not offer.

        Otherwise a CPU with weak memory ordering (arm64) may read a record before its header.
        """
        with self._lock:
            pass

    @staticmethod
    def _position(memory: mmap.mmap) -> int:
        return int(_U64.unpack(memory[0:8])[0])


class RingBuffer:
    """The only consumer of a ring buffer map, which stays the caller's. Close with `close`."""

    def __init__(self, of: Map) -> None:
        """Raises KernelError if its memory cannot be mapped."""
        page, size = mmap.PAGESIZE, of.shape.max_entries
        try:
            self._consumer = mmap.mmap(of.fd, page)
            # Producers' pages can only be mapped for reading (ringbuf_map_mmap_kern()).
            self._producer = mmap.mmap(of.fd, page + 2 * size, prot=mmap.PROT_READ, offset=page)
        except OSError as failure:
            raise error(failure.errno or 0, f"cannot map {of.name} into memory") from failure
        records = Records(self._consumer, self._producer, size, page)
        self.skip = records.skip
        self.read = records.read

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()
