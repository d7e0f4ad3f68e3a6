"""The kernel's settings below /proc/sys: those of net/ are of the calling thread's network namespace.

See proc_sys_net(5) and Documentation/networking/ip-sysctl.rst.
"""

import errno
from pathlib import Path

from ebpfproxy.errors import KernelError, NotFound, Rejected

ROOT = Path("/proc/sys")


def read(name: str) -> str:
    """The value, without its newline. `name` has slashes, since names of devices may have dots.

    Raises NotFound, Rejected.
    """
    try:
        return (ROOT / name).read_text().strip()
    except OSError as error:
        raise _failure(f"sysctl {name} cannot be read", error) from error


def ensure(name: str, value: str) -> bool:
    """Set it where it differs; whether it did. Raises NotFound, Rejected."""
    if read(name) == value:
        return False
    try:
        (ROOT / name).write_text(value)
    except OSError as error:
        raise _failure(f"sysctl {name} cannot be set to {value}", error) from error
    return True


def _failure(what: str, error: OSError) -> KernelError:
    if error.errno == errno.ENOENT:
        return NotFound(f"{what}: this kernel has none, or the device is gone")
    hint = ""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = "run as root; a container has to be privileged, or /proc/sys is read-only there"
    return Rejected(f"{what}: {error.strerror}", hint)
