"""What the kernel tells about the tables of iptables-legacy without giving them out.

Sources: iptables-legacy's own interface, include/uapi/linux/netfilter_ipv4/ip_tables.h and its ip6 twin;
get_info() of net/ipv4/netfilter/ip_tables.c; xt_table_seq_show() of net/netfilter/x_tables.c.
"""

import ctypes
import errno
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.errors import Rejected
from ebpfproxy.model.address import Family


class _Place(NamedTuple):
    number: int  # AF_*
    level: int  # SOL_IP, SOL_IPV6
    names: Path


_PLACES = {
    Family.IPV4: _Place(socket.AF_INET, socket.IPPROTO_IP, Path("/proc/thread-self/net/ip_tables_names")),
    Family.IPV6: _Place(socket.AF_INET6, socket.IPPROTO_IPV6, Path("/proc/thread-self/net/ip6_tables_names")),
}
_SO_GET_INFO = 64  # IPT_SO_GET_INFO, IP6T_SO_GET_INFO
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
    leaves all sizes as they are, such as another address in a rule. b"" where the table is not in use, which
    it is not by this either. Raises Rejected.
    """
    if table not in tables(family):  # the kernel would make it
        return b""
    place = _PLACES[family]
    buffer = ctypes.create_string_buffer(_INFO.pack(table.encode(), *[0] * 13), _INFO.size)
    length = ctypes.c_uint32(_INFO.size)
    try:
        with socket.socket(place.number, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
            failed = _libc.getsockopt(raw.fileno(), place.level, _SO_GET_INFO, buffer, ctypes.byref(length))
            number = ctypes.get_errno() if failed else 0
    except OSError as failure:
        raise _rejected(table, failure.errno or 0) from failure
    if number == errno.ENOENT:  # somebody removed the module in between
        return b""
    if number:
        raise _rejected(table, number)
    return buffer.raw[: length.value]


def _rejected(table: str, number: int) -> Rejected:
    hint = "run as root, or with CAP_NET_ADMIN and CAP_NET_RAW" if number == errno.EPERM else ""
    return Rejected(f"cannot ask about the table {table} of iptables-legacy: {os.strerror(number)}", hint)
