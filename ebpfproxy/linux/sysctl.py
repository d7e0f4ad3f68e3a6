"""Kernel settings below /proc/sys.

Settings below net/ are those of the calling thread's network namespace. See proc_sys_net(5) and
Documentation/networking/ip-sysctl.rst.
"""

import errno
import os
from pathlib import Path

from ebpfproxy.errors import KernelError, NotFound, Rejected

ROOT = Path("/proc/sys")


def read(name: str) -> str:
    """The value, without its newline. `name` has slashes, because device names may contain dots.

    Raises NotFound if the setting does not exist, Rejected if it cannot be read.
    """
    try:
        return (ROOT / name).read_text().strip()
    except OSError as error:
        raise _failure(f"sysctl {name} cannot be read", error) from error


def may_be(name: str, value: str) -> bool:
    """Whether the setting has this value or can be set to it.

    False if it does not exist or cannot be read. Also False if it has another value and cannot be written.
    """
    try:
        return read(name) == value or os.access(ROOT / name, os.W_OK)
    except KernelError:
        return False


def ensure(name: str, value: str) -> bool:
    """Set the value if it differs; return whether it was set.

    Raises NotFound if the setting does not exist, Rejected if it cannot be read or written.
    """
    if read(name) == value:
        return False
    _write(name, value)
    return True


def ensure_at_least(name: str, value: int) -> bool:
    """Set the value if the present one is a smaller number; return whether it was set.

    Raises NotFound if the setting does not exist. Raises Rejected if it is not a number or cannot be read or
    written.
    """
    present = read(name)
    try:
        enough = int(present) >= value
    except ValueError:
        raise Rejected(f"sysctl {name} is no number: {present!r}") from None
    if not enough:
        _write(name, str(value))
    return not enough


def _write(name: str, value: str) -> None:
    try:
        (ROOT / name).write_text(value)
    except OSError as error:
        raise _failure(f"sysctl {name} cannot be set to {value}", error) from error


def _failure(what: str, error: OSError) -> KernelError:
    if error.errno == errno.ENOENT:
        return NotFound(f"{what}: this kernel has none, or the device is gone")
    hint = ""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = (
            "run as root, privileged where in a container, else /proc/sys is read-only there; "
            "some are of the initial network namespace alone"
        )
    return Rejected(f"{what}: {error.strerror}", hint)
