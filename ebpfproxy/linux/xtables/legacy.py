"""iptables-legacy without its tools: what the kernel reports about its tables.

Sources: include/uapi/linux/netfilter_ipv4/ip_tables.h and its counterpart for IPv6; get_info() and
get_entries() of net/ipv4/netfilter/ip_tables.c; xt_table_seq_show() of net/netfilter/x_tables.c.
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


class _Interface(NamedTuple):
    number: int  # AF_*
    level: int  # SOL_IP, SOL_IPV6
    names: Path
    next_offset: int  # the position of the entry's length in struct ipt_entry or ip6t_entry
    counters: int  # the position of struct xt_counters in an entry


_INTERFACES = {
    Family.IPV4: _Interface(
        socket.AF_INET, socket.IPPROTO_IP, Path("/proc/thread-self/net/ip_tables_names"), 90, 96
    ),
    Family.IPV6: _Interface(
        socket.AF_INET6, socket.IPPROTO_IPV6, Path("/proc/thread-self/net/ip6_tables_names"), 142, 152
    ),
}
_SO_GET_INFO, _SO_GET_ENTRIES = 64, 65  # IPT_SO_GET_INFO and so on, and IP6T_SO_GET_INFO
_HEAD = struct.Struct("=32sI4x")  # struct ipt_get_entries: name, size; the entries follow
_LENGTH = struct.Struct("=H")
_NO_COUNTERS = bytes(16)
# struct ipt_getinfo: name, valid_hooks, hook_entry[5], underflow[5], num_entries, size
_INFO = struct.Struct("=32s13I")

LOCK_FILE = Path("/run/xtables.lock")
"""Every tool that changes a table opens it."""

_libc = ctypes.CDLL(None, use_errno=True)


def tables(family: Family) -> frozenset[str]:
    """The tables that exist in the calling thread's network namespace. The call creates none.

    Empty if the kernel has no ip_tables or it is not loaded. Raises Rejected if the file cannot be read.
    """
    path = _INTERFACES[family].names
    try:
        return frozenset(path.read_text().split())
    except FileNotFoundError:
        return frozenset()
    except OSError as failure:
        raise Rejected(f"cannot read {path}: {failure.strerror}", "run as root") from failure


def fingerprint(family: Family, table: str) -> bytes:
    """The layout of a table: the positions of its built-in chains, the number of its entries, and their size.

    It takes microseconds for any table. It differs after nearly every change, but not if all sizes stay, for
    example after a change of an address: see `digest`. b"" if the table does not exist; the call does not
    create it. Raises Rejected.
    """
    if table not in tables(family):  # the kernel would create it
        return b""
    info = ctypes.create_string_buffer(_INFO.pack(table.encode(), *[0] * 13), _INFO.size)
    return info.raw if _fill(family, table, _SO_GET_INFO, info, _INFO.size) else b""


def has_rules(family: Family, table: str) -> bool:
    """Whether a table has more than its built-in chains and their policies. Raises Rejected."""
    info = fingerprint(family, table)
    if not info:
        return False
    _, valid_hooks, *_, entries, _ = _INFO.unpack(info)
    policies: int = valid_hooks.bit_count()
    return bool(entries > policies + 1)  # and the end of the table


def digest(family: Family, table: str, largest: int) -> int:
    """A checksum of all rules of a table without their counters.

    The kernel copies the table: 100 MB in half a second, 1 MB in a few milliseconds. 0 if the table is larger
    than `largest` bytes, does not exist, or changes during the call. Raises Rejected.
    """
    info = fingerprint(family, table)
    size = _INFO.unpack(info)[-1] if info else 0
    if not 0 < size <= largest:
        return 0
    copy = bytearray(_HEAD.size + size)
    _HEAD.pack_into(copy, 0, table.encode(), size)
    if not _fill(family, table, _SO_GET_ENTRIES, (ctypes.c_char * len(copy)).from_buffer(copy), len(copy)):
        return 0
    interface, position = _INTERFACES[family], _HEAD.size
    while position < len(copy):
        counters = position + interface.counters
        copy[counters : counters + len(_NO_COUNTERS)] = _NO_COUNTERS
        position += _LENGTH.unpack_from(copy, position + interface.next_offset)[0]
    return zlib.crc32(copy)


def _fill(family: Family, table: str, option: int, buffer: "ctypes.Array[ctypes.c_char]", size: int) -> bool:
    """Fill the buffer by getsockopt(2). False if the table is gone or has changed. Raises Rejected."""
    interface, length = _INTERFACES[family], ctypes.c_uint32(size)
    try:
        with socket.socket(interface.number, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
            failed = _libc.getsockopt(raw.fileno(), interface.level, option, buffer, ctypes.byref(length))
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
    return Rejected(f"cannot read the table {table} of iptables-legacy: {os.strerror(number)}", hint)
