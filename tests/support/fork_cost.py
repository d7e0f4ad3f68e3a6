"""Makes forks of a test worker cheap.

Tests run functions in children of the worker, which enter the cgroup and network namespace of a pod. A worker
has 200 MB of memory after it has collected all tests. To copy its page tables and to free them in the child
takes 8 ms of CPU time for each fork, a third of the time of all tests.
"""

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

_HUGE = 1 << 21
_MADV_COLLAPSE = 25  # Linux 6.1 (7d8faaf15545); an older kernel returns EINVAL, and forks stay expensive

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def reduce() -> None:
    """Move the memory of this process to huge pages, whose page tables are short, and exempt its objects from
    garbage collection, which would write to them. Call it once, after all imports."""
    gc.collect()
    gc.freeze()
    for address in _huge_ranges(Path("/proc/self/maps").read_text()):
        _libc.madvise(address, _HUGE, _MADV_COLLAPSE)


def _huge_ranges(maps: str) -> Iterator[int]:
    """The addresses of all aligned ranges of private anonymous memory, given the text of /proc/PID/maps.

    >>> [hex(at) for at in _huge_ranges("1ff000-600000 rw-p 00000000 00:00 0 [heap]")]
    ['0x200000', '0x400000']
    >>> list(_huge_ranges("200000-400000 r-xp 00000000 fe:00 77 /bin/sh"))
    []
    """
    for line in maps.splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0":
            begin, end = (int(each, 16) for each in addresses.split("-"))
            yield from range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE)
