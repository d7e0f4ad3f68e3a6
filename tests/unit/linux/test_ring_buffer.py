"""Reading the memory of a ring buffer, which the test writes as the kernel does."""

import mmap
import struct

import pytest

from ebpfproxy.linux.bpf.ring_buffer import Records

PAGE, SIZE = 4096, 64
BUSY, DISCARDED = 1 << 31, 1 << 30


class Ring:
    """The memory of a ring buffer of SIZE bytes, and its producers."""

    def __init__(self) -> None:
        self.consumer, self.producer = mmap.mmap(-1, PAGE), mmap.mmap(-1, 2 * PAGE)
        self.records = Records(self.consumer, self.producer, SIZE, PAGE)

    def put(self, data: bytes, bits: int = 0) -> int:
        """Write a record; return its position."""
        at = self.position(self.producer)
        record = struct.pack("=II", len(data) | bits, 0) + data
        record += bytes(-len(record) % 8)
        for offset, byte in enumerate(record):
            inside = (at + offset) % SIZE
            self.producer[PAGE + inside] = self.producer[PAGE + SIZE + inside] = byte  # mapped twice
        self.producer[0:8] = struct.pack("=Q", at + len(record))
        assert at + len(record) - self.position(self.consumer) <= SIZE, "no room"
        return at

    def submit(self, at: int) -> None:
        """Clear the busy bit."""
        (word,) = struct.unpack_from("=I", self.producer, PAGE + at % SIZE)
        for base in (PAGE, PAGE + SIZE):
            struct.pack_into("=I", self.producer, base + at % SIZE, word & ~BUSY)

    @staticmethod
    def position(memory: mmap.mmap) -> int:
        return int(struct.unpack_from("=Q", memory)[0])

    def read(self) -> list[bytes]:
        found: list[bytes] = []
        assert self.records.read(found.append) == len(found)
        return found


@pytest.fixture
def ring() -> Ring:
    return Ring()


def test_an_empty_ring_has_no_records(ring: Ring) -> None:
    assert ring.read() == []
    assert ring.position(ring.consumer) == 0


def test_records_are_read_once_in_order(ring: Ring) -> None:
    ring.put(b"first")
    ring.put(b"second, longer")
    assert ring.read() == [b"first", b"second, longer"]
    assert ring.read() == []


def test_room_of_read_records_is_free(ring: Ring) -> None:
    ring.put(b"12345678")
    ring.read()
    assert ring.position(ring.consumer) == ring.position(ring.producer) == 16


def test_a_record_that_wraps_around_is_read_in_one_piece(ring: Ring) -> None:
    for number in range(20):  # 24 bytes each, which does not divide SIZE
        text = f"record {number:06}".encode()
        ring.put(text)
        assert ring.read() == [text]
    assert ring.position(ring.consumer) == 20 * 24


def test_a_discarded_record_is_passed_over(ring: Ring) -> None:
    ring.put(b"one")
    ring.put(b"gone", DISCARDED)
    ring.put(b"two")
    assert ring.read() == [b"one", b"two"]
    assert ring.position(ring.consumer) == ring.position(ring.producer)


def test_a_busy_record_stops_the_reader_until_it_is_submitted(ring: Ring) -> None:
    ring.put(b"one")
    busy = ring.put(b"two", BUSY)
    ring.put(b"three")
    assert ring.read() == [b"one"]
    assert ring.position(ring.consumer) == busy
    assert ring.read() == []
    ring.submit(busy)
    assert ring.read() == [b"two", b"three"]


def test_skip_discards_all_records(ring: Ring) -> None:
    ring.put(b"old")
    ring.records.skip()
    ring.put(b"new")
    assert ring.read() == [b"new"]
