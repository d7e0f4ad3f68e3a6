"""ipset: sets of addresses and ports to which iptables rules refer. ipset(8) reads and writes their members.

A member is text as ipset(8) shows it: "10.0.0.1", "10.0.0.1,tcp:80", "10.0.0.1,tcp:80,10.0.0.0/8" (a single
address without a prefix length), "fd00::1,udp:53,fd00::2", "30080".

The names and sizes of sets are read through netlink: the agent does it every 2 s, and needs no tool on nodes
without sets. All functions act in the calling thread's network namespace.

Sources: ipset(8) and lib/errcode.c of ipset 7.17; include/uapi/linux/netfilter/ipset/ip_set.h.
"""

import errno
import os
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, TableFull, Unsupported
from ebpfproxy.linux import tools
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.netlink.netlink import attribute, attributes, text
from ebpfproxy.model.address import Family

NETLINK_NETFILTER = 12
_LIST = 6 << 8 | 7  # NFNL_SUBSYS_IPSET, IPSET_CMD_LIST
_HEAD = bytes((socket.AF_INET, 0, 0, 0))  # struct nfgenmsg
_PROTOCOL, _NAME, _FLAGS, _DATA = 1, 2, 6, 7  # IPSET_ATTR_*
_ELEMENTS = 24  # within _DATA
_HEADERS_ONLY = attribute(_PROTOCOL, b"\6") + attribute(_FLAGS | 0x4000, (1 << 2).to_bytes(4))
_ABSENT = (errno.EINVAL, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP)  # nfnetlink_rcv_msg() without ipset

_FAMILIES = {"inet": Family.IPV4, "inet6": Family.IPV6}
_NAMES = {family: name for name, family in _FAMILIES.items()}
_AT_LINE = re.compile(r"Error in line (\d+): (.*)")
_UNRELATED = ("Kernel error received", "must be root", "Cannot open session", "Kernel support protocol")
"""Errors that do not depend on the command."""
_KINDS = {
    "does not exist": NotFound,
    "same name already exists": AlreadyExists,
    "is full": TableFull,
    "maximal number of sets": TableFull,
    "not supported by the kernel": Unsupported,
}
"""By part of a message of ipset(8): the class of the error. All others are Rejected."""


class IpSet(NamedTuple):
    """The properties of a set. A bitmap:port has no family and no maximum, and can hold all ports."""

    name: str
    type: str
    family: Family | None
    max_elements: int = 65536


class Stored(NamedTuple):
    """A set as it is in the kernel."""

    type: str
    family: Family | None
    members: frozenset[str]


def elements() -> dict[str, int]:
    """The number of members of each existing set, by name. Loads the module of ipset if it is not loaded.

    Raises Unsupported if the kernel has no ipset or the caller lacks a capability, Rejected.
    """
    try:
        payloads = netlink.dump(NETLINK_NETFILTER, _LIST, _HEAD + _HEADERS_ONLY)
    except OSError as error:
        message = f"cannot read ipsets: {os.strerror(error.errno or 0)}"
        if error.errno in (errno.EPERM, errno.EACCES):
            raise Unsupported(message, "run as root, or with CAP_NET_ADMIN") from error
        if error.errno in _ABSENT:
            raise Unsupported(message, "load CONFIG_IP_SET: modprobe ip_set") from error
        raise Rejected(message) from error
    found = {}
    for payload in payloads:
        header = dict(attributes(payload, len(_HEAD)))
        data = dict(attributes(header.get(_DATA, b""), 0))
        found[text(header[_NAME])] = int.from_bytes(data.get(_ELEMENTS, b""))
    return found


def available() -> None:
    """Raise Unsupported if the kernel has no ipset, or ipset(8) is not installed."""
    elements()
    _tool()


def read(names: Iterable[str]) -> dict[str, Stored]:
    """The sets of these names that exist. Raises KernelError, also for a set that ipset(8) cannot read."""
    output, rejected = _run([f"save {name}" for name in names])
    for failure in rejected.values():
        if not isinstance(failure, NotFound):
            raise failure
    kinds: dict[str, tuple[str, Family | None]] = {}
    members: dict[str, list[str]] = {}
    for line in output.splitlines():
        command, name, *words = line.split(" ", 5)
        if command == "create":
            kinds[name] = words[0], _FAMILIES.get("".join(words[2:3]))
        members.setdefault(name, []).extend(words[:1] if command == "add" else ())
    return {name: Stored(*kind, frozenset(members[name])) for name, kind in kinds.items()}


def creation(made: IpSet) -> str:
    """The command that creates an empty set; it does nothing if there is one with that type and maximum."""
    if made.family is None:
        return f"create {made.name} {made.type} range 0-65535"
    return f"create {made.name} {made.type} family {_NAMES[made.family]} maxelem {made.max_elements}"


def change(commands: Iterable[str]) -> dict[int, KernelError]:
    """Execute commands of ipset(8) in order; return the rejected ones, by position. All others take effect.

    Adding an existing member, deleting a missing one or destroying a missing set is no error. If a set does
    not exist or is full, the later commands of that kind for it are rejected for the same reason. Raises
    KernelError.
    """
    return _run(list(commands))[1]


def _run(commands: list[str]) -> tuple[str, dict[int, KernelError]]:
    """Execute commands; return their output, and which were rejected.

    ipset(8) stops at a rejected command, and may have postponed those before it. So the others are repeated.
    """
    rejected: dict[int, KernelError] = {}
    left = list(range(len(commands)))
    while left:
        done = tools.run((_tool(), "restore", "-exist"), "".join(f"{commands[each]}\n" for each in left))
        if not done.code:
            return done.output, rejected
        found = _AT_LINE.search(done.errors)
        if not found or any(each in found[2] for each in _UNRELATED):
            raise _failure("cannot use ipset", done.killed_by or done.errors.strip().rpartition(": ")[2])
        first = int(found[1]) - 1
        command = commands[left[first]]
        failure = _failure(f"cannot execute ipset {command}", found[2].rstrip())
        alike = f"{command.rpartition(' ')[0]} "
        of_set = isinstance(failure, NotFound | TableFull) and command.startswith(("add ", "del "))
        rejected[left[first]] = failure
        if of_set:
            later = left[first + 1 :]
            rejected |= dict.fromkeys((each for each in later if commands[each].startswith(alike)), failure)
        left = [each for each in left if each not in rejected]
    return "", rejected


def _failure(action: str, reason: str) -> KernelError:
    kind = next((kind for part, kind in _KINDS.items() if part in reason), Rejected)
    return kind(f"{action}: {reason}", "run as root, or with CAP_NET_ADMIN" if "root" in reason else "")


def _tool() -> str:
    path = tools.find("ipset")
    if not path:
        raise Unsupported("cannot find ipset", "install it: apt-get install ipset, or apk add ipset")
    return path
