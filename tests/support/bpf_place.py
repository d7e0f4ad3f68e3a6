"""A bpffs, a cgroup, maps and programs of a test's own. Needs root."""

import contextlib
import ctypes
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ebpf.maps import MapSizes, shapes
from ebpfproxy.errors import NotFound
from ebpfproxy.linux import mounts
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.bpf.bpf import Map, Program

MAP_CREATE = 0
HASH, ARRAY, PERCPU_HASH, PERCPU_ARRAY, LPM_TRIE = 1, 2, 5, 6, 11
NO_PREALLOC, MMAPABLE = 1, 1 << 10
SOCK_ADDR, CONNECT4 = 18, 10  # BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_CGROUP_INET4_CONNECT

RETURN_1 = struct.pack("=BBhi", 0xB7, 0, 0, 1) + struct.pack("=BBhi", 0x95, 0, 0, 0)
"""r0 = 1; exit: a program of a cgroup that lets everything pass."""


class BpfPlace(NamedTuple):
    """`cgroup` is below the root and empty; `bpffs` is a mount of its own."""

    cgroup: Path
    bpffs: Path


@contextlib.contextmanager
def bpf_place() -> Iterator[BpfPlace]:
    """Make one; everything pinned or attached there goes with it."""
    folder = Path(tempfile.mkdtemp(prefix=f"ebpfproxy-test-{os.getpid()}-"))
    cgroup = mounts.cgroup2_root() / folder.name
    try:
        cgroup.mkdir()
        mounts.ensure_bpffs(folder)
        yield BpfPlace(cgroup, folder)
    finally:
        with contextlib.suppress(NotFound):
            mounts.unmount(folder)
        folder.rmdir()
        remove_cgroup(cgroup)


def remove_cgroup(cgroup: Path) -> None:
    """With those below it; no error where it is gone."""
    for path, folders, _ in os.walk(cgroup, topdown=False):
        for name in folders:
            (Path(path) / name).rmdir()
    with contextlib.suppress(FileNotFoundError):
        cgroup.rmdir()


def build_maps(place: BpfPlace, sizes: MapSizes, name: str) -> Path:
    """Create the maps of bpf/maps.h, without programs. Returns the folder where they are pinned by name."""
    folder = place.bpffs / name / "maps"
    folder.mkdir(parents=True)
    made: dict[str, Map] = {}
    with contextlib.ExitStack() as stack:
        for shape in sorted(shapes(sizes).values(), key=lambda each: bool(each.inner)):
            layout = shape.key_size, shape.value_size, shape.entries, shape.flags
            inner = made[shape.inner] if shape.inner else None
            made[shape.name] = Map.create(shape.type, *layout, shape.name, inner)
            stack.callback(made[shape.name].close)
            made[shape.name].pin(folder / shape.name)
    return folder


def map_ids(bpffs: Path) -> dict[str, int]:
    """Map ids by pin: a recreated map has another id."""
    found = {}
    for path in (bpffs / "maps").iterdir():
        with contextlib.closing(Map.pinned(path)) as opened:
            found[path.name] = opened.shape.id
    return found


def create_map(kind: int, key: int, value: int, entries: int, flags: int = 0) -> Map:
    """A map that lasts until it is closed. `key` and `value` in bytes."""
    attr = struct.pack("=IIIIIII16s", kind, key, value, entries, flags, 0, 0, b"test")
    return Map(bpf.bpf(MAP_CREATE, attr, "cannot create a map")[0], "test")


def load_program(type_: int = SOCK_ADDR, attach_type: int = CONNECT4, name: bytes = b"test") -> Program:
    """A program that lets everything pass."""
    code = ctypes.create_string_buffer(RETURN_1, len(RETURN_1))
    license_ = ctypes.create_string_buffer(b"GPL")
    attr = struct.pack(
        "=IIQQIIQII16sII",
        *(type_, len(RETURN_1) // 8, ctypes.addressof(code), ctypes.addressof(license_)),
        *(0, 0, 0, 0, 0, name, 0, attach_type),
    )
    return Program(bpf.bpf(bpf.PROG_LOAD, attr, "cannot load")[0], name.decode())
