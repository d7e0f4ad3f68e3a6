"""bpf.Map with maps of every type that the project uses."""

import contextlib
import errno
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, TableFull, Unsupported
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.bpf.bpf import Link, Map, Program
from tests.support.bpf_place import (
    ARRAY,
    CONNECT4,
    HASH,
    LPM_TRIE,
    MMAPABLE,
    NO_PREALLOC,
    PERCPU_ARRAY,
    PERCPU_HASH,
    RETURN_1,
    SOCK_ADDR,
    BpfPlace,
    bpf_place,
    create_map,
    load_program,
)

pytestmark = pytest.mark.kernel

MANY = 10_000  # more than two batches


def u32(number: int) -> bytes:
    return struct.pack("=I", number)


def u64(number: int) -> bytes:
    return struct.pack("=Q", number)


@pytest.fixture(scope="module")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as created:
        yield created


@contextlib.contextmanager
def hash_map(entries: int, contents: dict[bytes, bytes] | None = None) -> Iterator[Map]:
    made = create_map(HASH, 4, 8, entries)
    try:
        made.update_all(list((contents or {}).items()))
        yield made
    finally:
        made.close()


def descriptors() -> set[tuple[str, str]]:
    """Of BPF objects: the number, and the object's id. Other descriptors may be closed at any time, when the
    collector finds what an earlier test left."""
    found = set()
    for entry in os.scandir("/proc/self/fdinfo"):
        with contextlib.suppress(FileNotFoundError):  # that of this directory
            lines = Path(entry.path).read_text().splitlines()
            found |= {(entry.name, line) for line in lines if line.startswith(("map_id", "prog_id"))}
    return found


@pytest.fixture(autouse=True)
def no_descriptor_is_left(place: BpfPlace) -> Iterator[None]:
    before = descriptors()
    yield
    assert not descriptors() - before


def test_creating_a_map_raises_the_memlock_limit_to_its_maximum() -> None:
    """Regression: on Linux 5.10, where maps count as locked memory, no map could be created in addition to
    the agent's pinned ones."""
    script = (
        "import resource as r; from ebpfproxy.linux.bpf.bpf import Map\n"
        "_, most = r.getrlimit(r.RLIMIT_MEMLOCK)\n"
        "r.setrlimit(r.RLIMIT_MEMLOCK, (4096, most))\n"
        f"Map.create({ARRAY}, 4, 4, 1 << 20).close()\n"
        "assert r.getrlimit(r.RLIMIT_MEMLOCK)[0] in (most, r.RLIM_INFINITY)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_written_entry_is_read_until_it_is_deleted() -> None:
    with hash_map(4) as made:
        assert made.lookup(u32(1)) is None
        made.update(u32(1), u64(7))
        made.update(u32(1), u64(8))
        assert made.lookup(u32(1)) == u64(8)
        assert made.delete(u32(1)) is True
        assert made.delete(u32(1)) is False
        assert made.lookup(u32(1)) is None


def test_the_shape_has_the_maps_creation_parameters() -> None:
    made = create_map(HASH, 4, 8, 33, NO_PREALLOC)
    shape = made.shape
    made.close()
    assert shape[0] == HASH
    assert shape[2:] == (4, 8, 33, NO_PREALLOC, "test")
    assert shape.id > 0


def test_a_full_map_raises_table_full_and_accepts_changes_of_its_entries() -> None:
    with hash_map(2, {u32(1): u64(1), u32(2): u64(2)}) as made:
        with pytest.raises(TableFull, match="map test"):
            made.update(u32(3), u64(3))
        with pytest.raises(TableFull, match="map test"):
            made.update_all([(u32(3), u64(3))])
        made.update(u32(2), u64(22))
        made.update_all([(u32(1), u64(11))])
        assert dict(made.items()) == {u32(1): u64(11), u32(2): u64(22)}


def test_flags_require_or_forbid_an_existing_entry() -> None:
    no_exist, exist = 1, 2
    with hash_map(2) as made:
        with pytest.raises(NotFound):
            made.update(u32(1), u64(1), exist)
        made.update(u32(1), u64(1), no_exist)
        with pytest.raises(AlreadyExists):
            made.update(u32(1), u64(2), no_exist)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_iterating_over_several_batches_yields_every_entry_once(
    one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {u32(n): u64(n * n) for n in range(MANY)}
    with hash_map(MANY, contents) as made:
        if one_by_one:
            without_batches(monkeypatch)
        found = list(made.items())
    assert len(found) == MANY
    assert dict(found) == contents


def without_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading works as on a kernel before 5.6."""

    def reject(*_: object) -> int:
        raise Unsupported("cannot access map test in batches: Invalid argument")

    monkeypatch.setattr(Map, "_batch", reject)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("kind", [HASH, LPM_TRIE])
def test_an_empty_map_has_no_entries(kind: int, one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = create_map(kind, 8, 8, 16, NO_PREALLOC)
    if one_by_one:
        without_batches(monkeypatch)
    assert list(made.items()) == []
    made.close()


def test_writing_an_empty_batch_changes_nothing() -> None:
    with hash_map(1) as made:
        made.update_all([])
        assert list(made.items()) == []


@contextlib.contextmanager
def exhausted(monkeypatch: pytest.MonkeyPatch, capacity: int) -> Iterator[list[float]]:
    """A kernel whose memory for new entries holds `capacity` of them, until a wait. Yields the waits."""
    left, waits = [capacity], list[float]()
    real_bpf, real_batch = bpf.bpf, Map._batch

    def refill(seconds: float) -> None:
        waits.append(seconds)
        left[0] = capacity

    def one(command: int, attr: bytes, what: str) -> tuple[int, bytes]:
        if command == bpf.MAP_UPDATE_ELEM:
            if not left[0]:
                raise bpf.error(errno.ENOMEM, what)
            left[0] -= 1
        return real_bpf(command, attr, what)

    def many(self: Map, command: int, start: int, end: int, keys: Any, values: Any, n: int) -> int:
        if command != bpf.MAP_UPDATE_BATCH:
            return real_batch(self, command, start, end, keys, values, n)
        part = min(n, left[0])
        written = real_batch(self, command, start, end, keys, values, part) if part else 0
        left[0] -= written
        if written < n:
            failure = bpf.error(errno.ENOMEM, "cannot write")
            failure.args = (failure.message, written)
            raise failure
        return written

    with monkeypatch.context() as patch:
        patch.setattr(bpf, "bpf", one)
        patch.setattr(Map, "_batch", many)
        patch.setattr("ebpfproxy.linux.bpf.bpf.time.sleep", refill)
        yield waits


def test_writing_waits_until_the_kernel_has_memory_for_new_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {u32(number): u64(number) for number in range(250)}
    with hash_map(1000) as made:
        with exhausted(monkeypatch, 100) as waits:
            made.update_all(list(entries.items()))
            assert len(waits) == 2
        assert dict(made.items()) == entries
        with exhausted(monkeypatch, 1) as waits:
            made.update(u32(1000), u64(1))
            made.update(u32(1001), u64(2))
            assert len(waits) == 1
        assert made.lookup(u32(1001)) == u64(2)


def test_without_memory_writing_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with hash_map(10) as made, exhausted(monkeypatch, 0) as waits:
        with pytest.raises(Rejected, match="Cannot allocate memory"):
            made.update(u32(1), u64(1))
        with pytest.raises(Rejected, match="Cannot allocate memory"):
            made.update_all([(u32(1), u64(1))])
        assert len(waits) == 2 * bpf._REFILLS
        assert made.lookup(u32(1)) is None


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_a_bucket_larger_than_a_batch_enlarges_the_batch(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For such a bucket the kernel returns ENOSPC (__htab_map_lookup_and_delete_batch in
    kernel/bpf/hashtab.c)."""
    contents = {u32(n): u64(n) for n in range(256)}
    rejections = []
    original = bpf.error

    def record(number: int, what: str) -> KernelError:
        rejections.append(number)
        return original(number, what)

    with hash_map(256, contents) as made:
        monkeypatch.setattr(bpf, "_CHUNK", chunk)
        monkeypatch.setattr(bpf, "error", record)
        found = list(made.items())
    assert len(found) == len(contents)
    assert dict(found) == contents
    assert errno.ENOSPC in rejections or chunk > 2


def test_iterating_over_an_array_yields_every_element() -> None:
    made = create_map(ARRAY, 4, 8, 5000)
    made.update_all([(u32(4999), u64(1)), (u32(0), u64(2))])
    found = dict(made.items())
    made.close()
    assert len(found) == 5000
    assert (found[u32(4999)], found[u32(0)], found[u32(1)]) == (u64(1), u64(2), u64(0))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_iterating_over_a_trie_yields_networks_of_every_length(
    one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(length: int, address: int) -> bytes:
        return struct.pack("=I", length) + address.to_bytes(4, "big")

    contents = {key(length, 0x0A000000): u32(length) for length in range(8, 33)}
    contents |= {key(32, 0x0A010000 + n): u32(n) for n in range(300)}
    made = create_map(LPM_TRIE, 8, 4, 4096, NO_PREALLOC)
    for packed, value in contents.items():
        made.update(packed, value)
    if one_by_one:
        without_batches(monkeypatch)
    found = list(made.items())
    assert made.lookup(key(32, 0x0A010005)) == u32(5)
    assert made.lookup(key(32, 0x0A020000)) == u32(14)  # the longest match, 10.0.0.0/14
    assert made.delete(key(8, 0x0A000000))
    assert not made.delete(key(8, 0x0A000000))
    made.close()
    assert len(found) == len(contents)
    assert dict(found) == contents


@pytest.mark.parametrize("kind", [PERCPU_HASH, PERCPU_ARRAY])
@pytest.mark.parametrize("size", [4, 8, 12])
def test_a_per_cpu_value_has_one_value_per_cpu_padded_to_eight_bytes(kind: int, size: int) -> None:
    cpus, stride = bpf.possible_cpus(), (size + 7) // 8 * 8
    made = create_map(kind, 4, size, 3)
    values = {
        u32(n): b"".join(bytes([16 * n + cpu] * size).ljust(stride, b"\0") for cpu in range(cpus))
        for n in range(3)
    }
    for packed, value in values.items():
        made.update(packed, value)
    assert {packed: made.lookup(packed) for packed in values} == values
    assert dict(made.items()) == values
    made.close()


def test_possible_cpus_include_all_online_cpus() -> None:
    assert bpf.possible_cpus() >= (os.cpu_count() or 1)


def test_deleting_entries_during_iteration_is_allowed() -> None:
    contents = {u32(n): u64(n) for n in range(MANY)}
    with hash_map(MANY, contents) as made:
        seen = 0
        for packed, _ in made.items():
            made.delete(packed)
            seen += 1
        assert seen <= MANY
        assert seen + len(list(made.items())) >= MANY


def test_a_memory_mapped_array_shares_the_maps_data_and_outlives_its_descriptor() -> None:
    made = create_map(ARRAY, 4, 4, 1000, MMAPABLE)
    memory = made.mapped()
    struct.pack_into("=I", memory, 8 * 999, 42)  # elements are 8-byte aligned
    assert made.lookup(u32(999)) == u32(42)
    made.update(u32(1), u32(7))
    made.close()
    assert struct.unpack_from("=I", memory, 8) == (7,)
    assert len(memory) >= 8 * 1000
    memory.close()


def test_a_map_is_mapped_once_until_its_last_user_closes_the_mapping() -> None:
    made = create_map(ARRAY, 4, 4, 1000, MMAPABLE)
    before = Path("/proc/self/smaps").read_text().count("anon_inode:bpf-map")
    first, second = made.mapped(), made.mapped()
    assert Path("/proc/self/smaps").read_text().count("anon_inode:bpf-map") == before + 1
    first.close()
    second[:4] = u32(7)
    assert made.lookup(u32(0)) == u32(7)
    second.close()
    for _ in range(2):
        with made.mapped() as third:
            assert third[:4] == u32(7)
    assert Path("/proc/self/smaps").read_text().count("anon_inode:bpf-map") == before
    made.close()


def test_a_map_without_the_mmapable_flag_cannot_be_memory_mapped() -> None:
    array, table = create_map(ARRAY, 4, 4, 4), create_map(HASH, 4, 4, 4)
    with pytest.raises(KernelError, match="cannot map test into memory"):
        array.mapped()
    with pytest.raises(Unsupported, match="cannot map test into memory"):
        table.mapped()
    array.close()
    table.close()


def test_a_pinned_map_is_the_same_map(place: BpfPlace) -> None:
    path = place.bpffs / "pinned"
    with hash_map(4, {u32(1): u64(1)}) as made:
        made.pin(path)
        with pytest.raises(AlreadyExists, match="pinned"):
            made.pin(path)
    again = Map.pinned(path)
    assert again.name == "pinned"
    assert again.lookup(u32(1)) == u64(1)
    again.close()
    path.unlink()
    with pytest.raises(NotFound, match="pinned"):
        Map.pinned(path)


def test_a_pinned_program_is_rejected_as_map_and_as_link(place: BpfPlace) -> None:
    path = place.bpffs / "a_program"
    program = load_program()
    program.pin(path)
    program.close()
    with pytest.raises(Rejected, match="a_program is not a map"):
        Map.pinned(path)
    with contextlib.closing(Program.pinned(path)) as again:
        assert again.id
    with pytest.raises(Rejected, match="a_program is not a link"):
        Link.pinned(path)
    path.unlink()


def test_pinning_outside_of_a_bpffs_is_rejected(tmp_path: Path) -> None:
    with hash_map(1) as made, pytest.raises(Rejected, match="cannot pin"):
        made.pin(tmp_path / "map")


def test_closing_twice_closes_no_other_descriptor() -> None:
    made = create_map(HASH, 4, 8, 1)
    fd = made.fd
    made.close()
    other = os.open("/dev/null", os.O_RDONLY)  # gets the number of the closed descriptor
    made.close()
    assert os.fstat(other)
    os.close(other)
    assert other == fd


def test_an_unfinished_iteration_leaves_no_descriptor_open() -> None:
    with hash_map(MANY, {u32(n): u64(n) for n in range(MANY)}) as made:
        before = descriptors()
        for _ in range(3):
            next(made.items())
        assert not descriptors() - before


# Probes


def test_loads_returns_whether_the_kernel_accepts_a_program() -> None:
    assert bpf.loads(SOCK_ADDR, CONNECT4, RETURN_1)
    assert not bpf.loads(SOCK_ADDR, 255, RETURN_1)  # no such hook
    assert not bpf.loads(255, CONNECT4, RETURN_1)  # no such type
    assert not bpf.loads(SOCK_ADDR, CONNECT4, RETURN_1[8:])  # r0 was never set
    call = struct.pack("=BBhi", 0x85, 0, 0, 100_000)  # no such helper
    assert not bpf.loads(SOCK_ADDR, CONNECT4, call + RETURN_1)


def test_without_capabilities_probing_raises_instead_of_returning_false() -> None:
    script = """
import ctypes, struct
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.bpf import bpf
assert ctypes.CDLL(None).capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)) == 0
code = bytes.fromhex("b7000000010000009500000000000000")
try:
    bpf.loads(18, 10, code)
except Rejected as failure:
    assert "CAP_BPF" in failure.hint
else:
    raise AssertionError("loaded")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
