"""Changes of links and tc by pyroute2: opened for one task, its errors turned into ours.

pyroute2 0.9 runs an asyncio loop of its own inside of each IPRoute, so that none may be used in a
thread in which a loop is running, nor in another thread than that which opened it. Opening one takes
0.3 ms, a request 0.5 ms. It acts in the network namespace in which the thread was when it was opened.

Imported only where something is to be changed: that takes 8 MB in an agent, whose other libraries have
loaded asyncio already, and 20 MB in a command. There is no lighter way in: each of its modules loads
the whole package (pyroute2/__init__.py).
"""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported

_ERRORS: dict[int, type[KernelError]] = {
    errno.ENODEV: NotFound,
    errno.ENOENT: NotFound,
    errno.EEXIST: AlreadyExists,
    errno.EOPNOTSUPP: Unsupported,
}


@contextlib.contextmanager
def opened(what: str) -> Iterator[Any]:
    """A pyroute2.IPRoute within the block; what the kernel rejects there is raised as our error.

    `what` is what the block is about to do, with the device's name: it begins the message.

    Raises NotFound (ENODEV, ENOENT), AlreadyExists, Unsupported (EOPNOTSUPP), and Rejected for all else.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute(ext_ack=True) as iproute:
            yield iproute
    except NetlinkError as rejected:
        raise error(rejected.code, what, str(rejected.args[1])) from rejected
    except OSError as failed:  # the socket's own: no more file descriptors, no room
        raise error(failed.errno or 0, what) from failed


def error(number: int, what: str, reason: str = "") -> KernelError:
    """The error of our tree that `number` (an errno) stands for; `reason` is the kernel's own wording."""
    hint = "run as root, or with CAP_NET_ADMIN" if number == errno.EPERM else ""
    return _ERRORS.get(number, Rejected)(f"{what}: {reason or os.strerror(number)}", hint)


def device_name(ifindex: int) -> str:
    """What to call a device in a message: its name, or its number where it is gone."""
    return _name(ifindex) or f"device number {ifindex}"


def exists(ifindex: int) -> bool:
    """Whether there is such a device now."""
    return bool(_name(ifindex))


def _name(ifindex: int) -> str:
    try:
        return socket.if_indextoname(ifindex)
    except (OSError, OverflowError):
        return ""
