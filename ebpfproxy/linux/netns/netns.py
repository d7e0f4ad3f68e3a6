"""Named network namespaces, as `ip netns` keeps them: a bind mount of each under /run/netns.

Namespaces belong to threads: `entered` and `enter` move the calling thread alone, and whatever it
forks later. See network_namespaces(7), setns(2), ip-netns(8).
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported

FOLDER = Path("/run/netns")

_OWN = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000
_MS_BIND = 1 << 12
_MS_REC = 1 << 14
_MS_SHARED = 1 << 20
_MNT_DETACH = 2
_SO_NETNS_COOKIE = 71
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

_libc = ctypes.CDLL(None, use_errno=True)
_ERRORS: dict[int, type[KernelError]] = {
    errno.ENOENT: NotFound,
    errno.EEXIST: AlreadyExists,
    errno.ENOSYS: Unsupported,
    errno.EPERM: Rejected,
}


def path(name: str) -> Path:
    """Where the namespace of that name is, whether it exists or not."""
    return FOLDER / name


def names(prefix: str = "") -> list[str]:
    """The names that exist and start with `prefix`, sorted; empty where there is none."""
    if not FOLDER.is_dir():
        return []
    return sorted(entry.name for entry in FOLDER.iterdir() if entry.name.startswith(prefix))


def create(name: str) -> None:
    """Make a network namespace that lives until `delete`, with its loopback device down.

    Raises AlreadyExists, or Rejected without CAP_SYS_ADMIN.
    """
    _share_folder()
    try:
        os.close(os.open(path(name), os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0))
    except OSError as error:
        raise _failure(f"network namespace {name}", error.errno or 0) from None
    back = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check("unshare", _libc.unshare(_CLONE_NEWNET))
        try:
            _check(
                f"mount {path(name)}", _libc.mount(_OWN.encode(), bytes(path(name)), b"none", _MS_BIND, None)
            )
        finally:
            enter(back)
    except KernelError:
        path(name).unlink()
        raise
    finally:
        os.close(back)


def delete(name: str) -> None:
    """Take the name away; the kernel frees the namespace once no process or socket is in it.

    Raises NotFound.
    """
    if not path(name).exists():
        raise NotFound(f"network namespace {name} does not exist")
    # EINVAL: not a mount point, so a creation that was cut short.
    if _libc.umount2(bytes(path(name)), _MNT_DETACH) and ctypes.get_errno() != errno.EINVAL:
        raise _failure(f"umount {path(name)}", ctypes.get_errno())
    path(name).unlink()


def enter(namespace: int) -> None:
    """Move the calling thread into the network namespace of that file descriptor, for good."""
    _check("setns", _libc.setns(namespace, _CLONE_NEWNET))


@contextlib.contextmanager
def entered(where: Path) -> Iterator[None]:
    """Be in the network namespace at `where` within the block: sockets made there stay there.

    Raises NotFound, or Rejected without CAP_SYS_ADMIN.
    """
    try:
        there = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _failure(f"network namespace {where}", error.errno or 0) from None
    try:
        back = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(there)
            yield
        finally:
            enter(back)
            os.close(back)
    finally:
        os.close(there)


@contextlib.contextmanager
def throw_away() -> Iterator[None]:
    """Be in a new network namespace within the block, with loopback down, that ends with it.

    Raises Rejected without CAP_SYS_ADMIN, Unsupported where the kernel has no network namespaces.
    """
    back = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check("unshare", _libc.unshare(_CLONE_NEWNET))
        try:
            yield
        finally:
            enter(back)
    finally:
        os.close(back)


def set_loopback_up() -> None:
    """In the calling thread's network namespace. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def cookie() -> int:
    """The cookie of the calling thread's network namespace: what bpf_get_netns_cookie gives there.

    Never 0, and never used twice until the machine starts again. Raises Unsupported before Linux 5.14
    (e8b9eab99232, "net: retrieve netns cookie via getsocketopt").
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            raw = any_socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError as error:
            if error.errno == errno.ENOPROTOOPT:
                raise Unsupported("this kernel has no SO_NETNS_COOKIE (Linux 5.14)") from None
            raise _failure("SO_NETNS_COOKIE", error.errno or 0) from None
    return int.from_bytes(raw, sys.byteorder)


def _share_folder() -> None:
    """Make FOLDER a shared mount, as `ip netns add` does: else its first run would bury our mounts."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    folder = bytes(FOLDER)
    if not _libc.mount(b"", folder, b"none", _MS_SHARED | _MS_REC, None):
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise _failure(f"mount {FOLDER}", ctypes.get_errno())
    _check(f"mount {FOLDER}", _libc.mount(folder, folder, b"none", _MS_BIND | _MS_REC, None))
    _check(f"mount {FOLDER}", _libc.mount(b"", folder, b"none", _MS_SHARED | _MS_REC, None))


def _check(what: str, result: int) -> None:
    if result:
        raise _failure(what, ctypes.get_errno())


def _failure(what: str, number: int) -> KernelError:
    hint = "it takes the capability CAP_SYS_ADMIN" if number == errno.EPERM else ""
    failure = _ERRORS.get(number, KernelError)(f"{what}: {os.strerror(number)}", hint)
    failure.__cause__ = OSError(number, os.strerror(number))
    return failure
