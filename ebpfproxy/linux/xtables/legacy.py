"""What the kernel reports about the tables of iptables-legacy, without the tool that makes text of them.

Sources: iptables-legacy's own interface, include/uapi/linux/netfilter_ipv4/ip_tables.h and its ip6 twin;
get_info() and get_entries() of net/ipv4/netfilter/ip_tables.c; xt_table_seq_show() of
net/netfilter/x_tables.c.
"""

import ctypes
import errno
import os
import socket
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.errors import Rejected
from ebpfproxy.model.address import Family


class _Place(NamedTuple):
    number: int  # AF_*
    level: int  # SOL_IP, SOL_IPV6
    names: Path
    next_offset: int  # in an entry, struct ipt_entry or ip6t_entry: where it says how long it is
    counters: int  # in an entry: where its struct xt_counters is


_PLACES = {
    Family.IPV4: _Place(
        socket.AF_INET, socket.IPPROTO_IP, Path("/proc/thread-self/net/ip_tables_names"), 90, 96
    ),
    Family.IPV6: _Place(
        socket.AF_INET6, socket.IPPROTO_IPV6, Path("/proc/thread-self/net/ip6_tables_names"), 142, 152
    ),
}
_SO_GET_INFO, _SO_GET_ENTRIES = 64, 65  # IPT_SO_GET_INFO and so on, and IP6T_SO_GET_INFO
_HEAD = struct.Struct("=32sI4x")  # struct ipt_get_entries: name, size; the entries follow
_LENGTH = struct.Struct("=H")
_NO_COUNTERS = bytes(16)
# struct ipt_getinfo: name, valid_hooks, hook_entry[5], underflow[5], num_entries, size
_INFO = struct.Struct("=32s13I")

_libc = ctypes.CDLL(None, use_errno=True)


def tables(family: Family) -> frozenset[str]:
    """The tables that are in use in the calling thread's network namespace; asking makes none.

    Empty where the kernel has no ip_tables, or it is not loaded. Raises Rejected where we may not look.
    """
    path = _PLACES[family].names
    try:
        return frozenset(path.read_text().split())
    except FileNotFoundError:
        return frozenset()
    except OSError as failure:
        raise Rejected(f"cannot read {path}: {failure.strerror}", "run as root") from failure


def fingerprint(family: Family, table: str) -> bytes:
    """Where the built-in chains begin and end in a table, how many entries it has, and how large all are.

    That changes with nearly every change, and takes microseconds at any size. It does not with one that
    leaves all sizes as they are, such as another address in a rule: see `digest`. b"" where the table is not
    in use, which it is not by this either. Raises Rejected.
    """
    if table not in tables(family):  # the kernel would make it
        return b""
    asked = ctypes.create_string_buffer(_INFO.pack(table.encode(), *[0] * 13), _INFO.size)
    return asked.raw if _ask(family, table, _SO_GET_INFO, asked, _INFO.size) else b""


def digest(family: Family, table: str, largest: int) -> int:
    """A number that all rules of a table are in, but for their counters; another one after nearly any change.

    The kernel gives out a copy: of 100 MB in half a second, of 1 MB in a few milliseconds. 0 where it is
    larger than `largest` bytes, where the table is not in use, and where it just changes. Raises Rejected.
    """
    info = fingerprint(family, table)
    size = _INFO.unpack(info)[-1] if info else 0
    if not 0 < size <= largest:
        return 0
    copy = bytearray(_HEAD.size + size)
    _HEAD.pack_into(copy, 0, table.encode(), size)
    if not _ask(family, table, _SO_GET_ENTRIES, (ctypes.c_char * len(copy)).from_buffer(copy), len(copy)):
        return 0
    place, at = _PLACES[family], _HEAD.size
    while at < len(copy):
        counters = at + place.counters
        copy[counters : counters + len(_NO_COUNTERS)] = _NO_COUNTERS
        at += _LENGTH.unpack_from(copy, at + place.next_offset)[0]
    return zlib.crc32(copy)


def _ask(family: Family, table: str, what: int, buffer: "ctypes.Array[ctypes.c_char]", size: int) -> bool:
    """Have the buffer filled; False where the table went meanwhile, or is another one. Raises Rejected."""
    place, length = _PLACES[family], ctypes.c_uint32(size)
    try:
        with socket.socket(place.number, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
            failed = _libc.getsockopt(raw.fileno(), place.level, what, buffer, ctypes.byref(length))
            number = ctypes.get_errno() if failed else 0
    except OSError as failure:
        raise _rejected(table, failure.errno or 0) from failure
    if number in (errno.ENOENT, errno.EAGAIN):  # the module was removed; get_entries(): sizes differ
        return False
    if number:
        raise _rejected(table, number)
    return True


def _rejected(table: str, number: int) -> Rejected:
    hint = "run as root, or with CAP_NET_ADMIN and CAP_NET_RAW" if number == errno.EPERM else ""
    return Rejected(f"cannot ask about the table {table} of iptables-legacy: {os.strerror(number)}", hint)
