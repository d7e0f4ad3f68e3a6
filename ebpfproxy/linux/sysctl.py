"""Kernel settings below /proc/sys.

Settings below net/ are those of the calling thread's network namespace, through any mount of proc. See
proc_sys_net(5) and Documentation/networking/ip-sysctl.rst.

Container runtimes make /proc/sys read-only unless the container is privileged. Then settings are written
below /host/proc/sys, where deploy/least-privilege mounts the part net/ of the host.
"""

import errno
import os
from pathlib import Path

from ebpfproxy.errors import KernelError, NotFound, Rejected

ROOT = Path("/proc/sys")
MOUNTED = Path("/host/proc/sys")


def read(name: str) -> str:
    """The value, without its newline. `name` has slashes, because device names may contain dots.

    Raises NotFound if the setting does not exist, Rejected if it cannot be read.
    """
    try:
        return (ROOT / name).read_text().strip()
    except OSError as error:
        raise _failure(f"cannot read sysctl {name}", error) from error


def may_be(name: str, value: str) -> bool:
    """Whether the setting has this value or can be set to it.

    False if it does not exist, cannot be read, or has another value and cannot be written.
    """
    try:
        if read(name) == value:
            return True
    except KernelError:
        return False
    return any(os.access(root / name, os.W_OK) for root in (ROOT, MOUNTED))


def ensure(name: str, value: str) -> bool:
    """Set the value if it differs; return whether it was set.

    Raises NotFound if the setting does not exist, Rejected if it cannot be read or written.
    """
    if read(name) == value:
        return False
    _write(name, value)
    return True


def ensure_at_least(name: str, value: int) -> bool:
    """Set the value if the current one is a smaller number; return whether it was set.

    Raises NotFound if the setting does not exist. Raises Rejected if it is not a number or cannot be read or
    written.
    """
    current = read(name)
    try:
        enough = int(current) >= value
    except ValueError:
        raise Rejected(f"sysctl {name} is not a number: {current!r}") from None
    if not enough:
        _write(name, str(value))
    return not enough


def _write(name: str, value: str) -> None:
    try:
        try:
            (ROOT / name).write_text(value)
        except OSError as error:
            if error.errno != errno.EROFS or not MOUNTED.exists():
                raise
            (MOUNTED / name).write_text(value)
    except OSError as error:
        raise _failure(f"cannot set sysctl {name} to {value}", error) from error


def _failure(message: str, error: OSError) -> KernelError:
    if error.errno == errno.ENOENT:
        return NotFound(f"{message}: {error.strerror}; this kernel lacks it, or the device is gone")
    hint = ""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = (
            f"run as root; in a container, run privileged or mount the host's /proc/sys/net at {MOUNTED}/net,"
            " since /proc/sys is read-only otherwise; "
            "some settings exist only in the initial network namespace"
        )
    return Rejected(f"{message}: {error.strerror}", hint)
