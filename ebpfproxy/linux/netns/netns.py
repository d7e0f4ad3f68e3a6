"""Named network namespaces, compatible with `ip netns`: each is a bind mount below /run/netns.

Each thread has a network namespace. `entered` and `enter` move only the calling thread; its later child
processes inherit the namespace. See network_namespaces(7), setns(2), ip-netns(8).
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
    """The path of the namespace of that name, whether or not it exists."""
    return FOLDER / name


def names(prefix: str = "") -> list[str]:
    """The names of the existing namespaces that start with `prefix`, sorted."""
    if not FOLDER.is_dir():
        return []
    return sorted(entry.name for entry in FOLDER.iterdir() if entry.name.startswith(prefix))


def create(name: str) -> None:
    """Create a network namespace that exists until `delete`. Its loopback device is down.

    Raises AlreadyExists, or Rejected without CAP_SYS_ADMIN.
    """
    _share_folder()
    try:
        os.close(os.open(path(name), os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0))
    except OSError as error:
        raise _failure(f"create network namespace {name}", error.errno or 0) from None
    previous = _open_own()
    try:
        _check("create a network namespace", _libc.unshare(_CLONE_NEWNET))
        try:
            _check(
                f"mount {path(name)}", _libc.mount(_OWN.encode(), bytes(path(name)), b"none", _MS_BIND, None)
            )
        finally:
            enter(previous)
    except KernelError:
        path(name).unlink()
        raise
    finally:
        os.close(previous)


def delete(name: str) -> None:
    """Remove the name. The kernel frees the namespace once no process or socket uses it.

    Raises NotFound.
    """
    if not path(name).exists():
        raise NotFound(f"network namespace {name} does not exist")
    # EINVAL: not a mount point, because `create` was interrupted.
    if _libc.umount2(bytes(path(name)), _MNT_DETACH) and ctypes.get_errno() != errno.EINVAL:
        raise _failure(f"unmount {path(name)}", ctypes.get_errno())
    path(name).unlink()


def enter(namespace: int) -> None:
    """Move the calling thread permanently into the network namespace of that file descriptor."""
    _check("enter a network namespace", _libc.setns(namespace, _CLONE_NEWNET))


@contextlib.contextmanager
def entered(namespace_path: Path) -> Iterator[None]:
    """Run the block in the network namespace at `namespace_path`. Sockets created in the block stay in it.

    Raises NotFound, or Rejected without CAP_SYS_ADMIN.
    """
    try:
        target = os.open(namespace_path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _failure(f"open network namespace {namespace_path}", error.errno or 0) from None
    try:
        previous = _open_own()
        try:
            enter(target)
            yield
        finally:
            enter(previous)
            os.close(previous)
    finally:
        os.close(target)


@contextlib.contextmanager
def throw_away() -> Iterator[None]:
    """Run the block in a new network namespace with loopback down, which is removed afterwards.

    Raises Rejected without CAP_SYS_ADMIN, Unsupported if the kernel has no network namespaces.
    """
    previous = _open_own()
    try:
        _check("create a network namespace", _libc.unshare(_CLONE_NEWNET))
        try:
            yield
        finally:
            enter(previous)
    finally:
        os.close(previous)


def set_loopback_up() -> None:
    """Set the loopback device of the calling thread's network namespace up. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def cookie() -> int:
    """The cookie of the calling thread's network namespace, as bpf_get_netns_cookie() returns it.

    It is never 0 and is unique until the next boot. Raises Unsupported before Linux 5.14 (e8b9eab99232,
    "net: retrieve netns cookie via getsocketopt").
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            raw = any_socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError as error:
            if error.errno == errno.ENOPROTOOPT:
                raise Unsupported("this kernel has no SO_NETNS_COOKIE (Linux 5.14)") from None
            raise _failure("read SO_NETNS_COOKIE", error.errno or 0) from None
    return int.from_bytes(raw, sys.byteorder)


def _share_folder() -> None:
    """Make FOLDER a shared mount, as `ip netns add` does. Otherwise its first run would hide these mounts."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    folder = bytes(FOLDER)
    if not _libc.mount(b"", folder, b"none", _MS_SHARED | _MS_REC, None):
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise _failure(f"mount {FOLDER}", ctypes.get_errno())
    _check(f"mount {FOLDER}", _libc.mount(folder, folder, b"none", _MS_BIND | _MS_REC, None))
    _check(f"mount {FOLDER}", _libc.mount(b"", folder, b"none", _MS_SHARED | _MS_REC, None))


def _open_own() -> int:
    """A file descriptor of the calling thread's network namespace."""
    try:
        return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _failure("open the thread's network namespace", error.errno or 0) from None


def _check(action: str, result: int) -> None:
    if result:
        raise _failure(action, ctypes.get_errno())


def _failure(action: str, number: int) -> KernelError:
    """`action` completes "cannot ..."."""
    hint = "run with the capability CAP_SYS_ADMIN" if number == errno.EPERM else ""
    failure = _ERRORS.get(number, KernelError)(f"cannot {action}: {os.strerror(number)}", hint)
    failure.__cause__ = OSError(number, os.strerror(number))
    return failure
