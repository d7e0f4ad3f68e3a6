"""Replaces the calls through which a mode reaches the kernel by ones that an injector can let fail.

- bpf(2) and other functions of libc: the `_libc` of each module of `ebpfproxy.linux`;
- sockets: the class `socket.socket`, also for pyroute2;
- files, folders and child processes: an audit hook (PEP 578), which may raise;
- the tools iptables and ipset, and replies of nf_tables and netlink that reject a request;
- requests to relays of mode userspace, which may have ended;
- writes to mapped memory, which cannot fail: the process can be killed there.

The replacement is permanent, so `install` is for a forked process.
"""

import ctypes
import errno
import os
import re
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ebpfproxy.backends.ebpf.services.arrays import Arrays
from ebpfproxy.backends.userspace import messages
from ebpfproxy.linux import tools
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.nft import nft
from tests.faults.injector import Injector

E = errno
_NO_MEMORY = (E.ENOMEM,)
_BUCKET = (E.ENOMEM, E.EBUSY)
_NEW_DESCRIPTOR = (E.ENOMEM, E.EMFILE, E.ENFILE)
_BPF: Mapping[int, tuple[str, Sequence[int]]] = {
    bpf.MAP_CREATE: ("MAP_CREATE", (*_NEW_DESCRIPTOR, E.EPERM)),
    bpf.MAP_LOOKUP_ELEM: ("MAP_LOOKUP_ELEM", _NO_MEMORY),
    bpf.MAP_UPDATE_ELEM: ("MAP_UPDATE_ELEM", (*_BUCKET, E.E2BIG)),
    bpf.MAP_DELETE_ELEM: ("MAP_DELETE_ELEM", _BUCKET),
    bpf.MAP_GET_NEXT_KEY: ("MAP_GET_NEXT_KEY", _NO_MEMORY),
    bpf.PROG_LOAD: ("PROG_LOAD", (*_NEW_DESCRIPTOR, E.EAGAIN, E.EPERM)),
    bpf.OBJ_PIN: ("OBJ_PIN", (E.ENOMEM, E.ENOSPC)),
    bpf.OBJ_GET: ("OBJ_GET", _NEW_DESCRIPTOR),
    bpf.PROG_ATTACH: ("PROG_ATTACH", (E.ENOMEM, E.EPERM)),
    bpf.PROG_DETACH: ("PROG_DETACH", (E.ENOMEM, E.EPERM)),
    bpf.PROG_GET_FD_BY_ID: ("PROG_GET_FD_BY_ID", (*_NEW_DESCRIPTOR, E.ENOENT)),
    bpf.OBJ_GET_INFO_BY_FD: ("OBJ_GET_INFO_BY_FD", _NO_MEMORY),
    bpf.PROG_QUERY: ("PROG_QUERY", _NO_MEMORY),
    bpf.MAP_LOOKUP_BATCH: ("MAP_LOOKUP_BATCH", _BUCKET),
    bpf.MAP_UPDATE_BATCH: ("MAP_UPDATE_BATCH", _BUCKET),
    bpf.MAP_DELETE_BATCH: ("MAP_DELETE_BATCH", _BUCKET),
    bpf.LINK_CREATE: ("LINK_CREATE", (*_NEW_DESCRIPTOR, E.EBUSY, E.EPERM)),
    bpf.LINK_UPDATE: ("LINK_UPDATE", (E.ENOMEM, E.EBUSY)),
    bpf.LINK_DETACH: ("LINK_DETACH", _NO_MEMORY),
}
"""By command: its name, and errors that it can return at any time."""
_BATCHES = {bpf.MAP_LOOKUP_BATCH, bpf.MAP_UPDATE_BATCH, bpf.MAP_DELETE_BATCH}
_COUNT_AT = 32  # the field `count` of a batch

_LIBC: Mapping[str, Sequence[int]] = {
    "mount": (E.ENOMEM, E.EBUSY),
    "umount2": (E.EBUSY,),
    "statfs": _NO_MEMORY,
    "getsockopt": _NO_MEMORY,
    "connect": (E.EAGAIN, E.EPERM),
    "syscall": _NEW_DESCRIPTOR,  # except bpf(2): pidfd_open, pidfd_getfd, fsopen
}

_FILES: Mapping[str, Sequence[int]] = {
    "open": _NEW_DESCRIPTOR,
    "os.mkdir": (E.ENOMEM, E.ENOSPC),
    "os.remove": _NO_MEMORY,
    "os.rmdir": (E.ENOMEM, E.EBUSY),
    "os.rename": (E.ENOMEM, E.ENOSPC),
    "os.listdir": _NEW_DESCRIPTOR,
    "os.scandir": _NEW_DESCRIPTOR,
}
"""By audit event, for paths of the kernel only."""
_OFTEN = 20
_KERNEL_PATHS = ("/proc/", "/sys/", "/run/")

_TOOL_ERRORS = (
    "iptables: Memory allocation problem.\n",
    "Another app is currently holding the xtables lock. Perhaps you want to use the -w option?\n",
    "iptables-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: Invalid argument\n",
    "iptables-restore: line 3 failed\n",
)
_REJECTED_LINE = 3


def install(faults: Injector, *folders: Path) -> None:
    """Replace the calls in this process. `folders`: further folders of the kernel, such as a bpffs."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ebpfproxy.") and hasattr(module, "_libc"):
            vars(module)["_libc"] = _Libc(vars(module)["_libc"], faults)
    socket.socket = _socket_class(faults)  # type: ignore[misc]
    _watch_files(faults, (*_KERNEL_PATHS, *map(str, folders)))
    _replace_tools(faults)
    _replace_replies(faults)
    _replace_relays(faults)
    _replace_memory(faults)


class _Libc:
    """The functions of libc that can fail; all others are passed through."""

    def __init__(self, real: Any, faults: Injector) -> None:
        self._real = real
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name == "syscall":
            return lambda *arguments: self._syscall(real, *arguments)
        return lambda *arguments: self._run(name, _LIBC.get(name, ()), real, *arguments)

    def __getitem__(self, name: str) -> Any:
        """For test runs of programs, which do not fail."""
        return self._real[name]

    def _syscall(self, real: Any, number: int, *arguments: Any) -> int:
        if number != bpf.syscall_number():
            return self._run(f"syscall {number}", _LIBC["syscall"], real, number, *arguments)
        command, buffer, size = arguments
        name, choices = _BPF.get(command, (f"bpf {command}", ()))
        failure = self._faults.errno(name, choices)
        if not failure:
            return int(real(number, command, buffer, size))
        if command in _BATCHES and failure != E.ENOMEM:  # the kernel then writes how many it handled
            struct.pack_into("=I", buffer, _COUNT_AT, 0)
        ctypes.set_errno(failure)
        return -1

    def _run(self, name: str, choices: Sequence[int], real: Any, *arguments: Any) -> int:
        failure = self._faults.errno(name, choices)
        if failure:
            ctypes.set_errno(failure)
            return -1
        return int(real(*arguments))


def _socket_class(faults: Injector) -> type[socket.socket]:
    real = socket.socket

    class Socket(real):  # type: ignore[misc, valid-type]
        def __init__(self, family: int = -1, *arguments: Any, **named: Any) -> None:
            self._fails = family == socket.AF_NETLINK
            if family in (socket.AF_NETLINK, socket.AF_INET, socket.AF_INET6):
                faults.call("socket", (*_NEW_DESCRIPTOR, E.ENOBUFS), lambda: None)
            super().__init__(family, *arguments, **named)

        def bind(self, address: Any) -> None:
            faults.call("bind", self._only(_NO_MEMORY), lambda: super(Socket, self).bind(address))

        def send(self, *arguments: Any) -> int:
            choices = self._only((E.ENOBUFS,))
            return int(faults.call("send", choices, lambda: super(Socket, self).send(*arguments)))

        def sendto(self, *arguments: Any) -> int:
            choices = self._only((E.ENOBUFS, E.ENOMEM, E.EAGAIN))
            return int(faults.call("sendto", choices, lambda: super(Socket, self).sendto(*arguments)))

        def recv(self, *arguments: Any) -> bytes:
            choices = self._errors()
            return bytes(faults.call("recv", choices, lambda: super(Socket, self).recv(*arguments)))

        def recvmsg(self, *arguments: Any) -> Any:
            return faults.call("recvmsg", self._errors(), lambda: super(Socket, self).recvmsg(*arguments))

        def _errors(self) -> Sequence[int]:
            """A socket that does not wait returns EAGAIN only if there is nothing."""
            waits = (E.ETIMEDOUT,) if self.gettimeout() else ()
            return self._only((E.ENOBUFS, E.ENOMEM, *waits))

        def _only(self, choices: Sequence[int]) -> Sequence[int]:
            """The pipes of asyncio are not part of the kernel's interfaces."""
            return choices if self._fails else ()

    return Socket


def _watch_files(faults: Injector, folders: Sequence[str]) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            faults.call(event, (E.EAGAIN, E.ENOMEM, E.EMFILE), lambda: None)
        choices = _FILES.get(event)
        if choices and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.fsdecode(arguments[0])
            if path.startswith(tuple(folders)):
                faults.call(f"{event} {_without_numbers(path)}", choices, lambda: None)

    sys.addaudithook(hook)
    for name in ("stat", "readlink"):  # which the audit does not report
        _replace_file_call(faults, name, folders)


def _replace_file_call(faults: Injector, name: str, folders: Sequence[str]) -> None:
    real = getattr(os, name)

    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike):
            text = os.fsdecode(path)
            if text.startswith(tuple(folders)):
                # They are most of all calls, so fewer of them fail.
                choices = () if faults.choose(_OFTEN) else _NO_MEMORY
                point = f"{name} {_without_numbers(text)}"
                return faults.call(point, choices, lambda: real(path, *arguments, **named))
        return real(path, *arguments, **named)

    setattr(os, name, call)


def _without_numbers(path: str) -> str:
    return re.sub(r"[0-9a-f]{8,}|\d+", "N", path)


def _replace_tools(faults: Injector) -> None:
    """Let iptables and ipset fail, or be killed after they have changed the kernel."""
    real, done = tools.run, tools.Done

    def run(command: Sequence[str], text: str = "") -> Any:
        name = re.sub(r".*(legacy|nft)", "", command[0]) or command[0]
        kind = faults.errno(f"tool {name}", (E.EIO, E.EINTR))
        if kind == E.EIO:
            count = len(_TOOL_ERRORS) if text.count("\n") >= _REJECTED_LINE else len(_TOOL_ERRORS) - 1
            return done(4, "", _TOOL_ERRORS[faults.choose(count)])
        result = real(command, text)
        return done(-9, "", "") if kind == E.EINTR else result

    tools.run = run


def _replace_replies(faults: Injector) -> None:
    """Let nf_tables reject a transaction, and netlink single requests."""
    commit, changes = nft.Session.commit, netlink.changes

    def rejecting(self: nft.Session, operations: Sequence[Any]) -> list[nft.Rejection]:
        failure = faults.errno("nft transaction", (E.ENOMEM, E.EAGAIN)) if operations else 0
        if failure == E.ENOMEM:
            return [nft.Rejection(faults.choose(len(operations)), failure, "")]
        if failure:
            raise nft.failure("cannot change nftables", failure)
        return commit(self, operations)

    def some_rejected(protocol: int, requests: Sequence[Any]) -> dict[int, netlink.Rejection]:
        failure = faults.errno("netlink request", _NO_MEMORY) if requests else 0
        if not failure:
            return changes(protocol, requests)
        chosen = faults.choose(len(requests))
        others = [each for number, each in enumerate(requests) if number != chosen]
        found = {number + (number >= chosen): each for number, each in changes(protocol, others).items()}
        return found | {chosen: netlink.Rejection(failure, os.strerror(failure))}

    nft.Session.commit = rejecting  # type: ignore[method-assign]
    netlink.changes = some_rejected


def _replace_relays(faults: Injector) -> None:
    """Let relays end or hang before or after they have answered."""
    real = messages.ask

    def ask(control: socket.socket, request: messages.Request) -> messages.Answer:
        failure = faults.errno("relay request", (E.EPIPE, E.ETIMEDOUT))
        if failure == E.EPIPE:
            raise OSError(failure, os.strerror(failure))
        answer = real(control, request)
        if failure:
            raise TimeoutError
        return answer

    messages.ask = ask


def _replace_memory(faults: Injector) -> None:
    for name in ("write_slots", "write_endpoint", "set_flags"):
        setattr(Arrays, name, _counted(getattr(Arrays, name), name, faults))


def _counted(real: Callable[..., None], name: str, faults: Injector) -> Callable[..., None]:
    def write(*arguments: Any) -> None:
        faults.errno(name, ())
        real(*arguments)

    return write
