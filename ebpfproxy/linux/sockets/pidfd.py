"""Descriptors of other processes: pidfd_open(2) and pidfd_getfd(2).

A duplicate refers to the same open file as the original, so connect(2) on the duplicate of a socket
connects the socket of the other process. The other process is not stopped and is not notified.

pidfd_open is in Linux 5.3 (32fcb426ec00), pidfd_getfd in 5.6 (8649c322f75c). pidfd_getfd needs
PTRACE_MODE_ATTACH_REALCREDS: CAP_SYS_PTRACE in the user namespace of the process, and with Yama
kernel.yama.ptrace_scope below 3. Process IDs are those of the caller's PID namespace.
"""

import ctypes
import errno
import os

from ebpfproxy.errors import KernelError, NotFound, Rejected, Unsupported

_PIDFD_GETFD = 438  # the same number on all architectures but alpha
_NO_DESCRIPTOR = 1 << 30  # beyond what a process may open (fs.nr_open)

_libc = ctypes.CDLL(None, use_errno=True)
_GONE = (errno.ESRCH, errno.EBADF)


def open_process(pid: int) -> int:
    """A descriptor of a process, to be closed by the caller.

    Raises NotFound where there is no such process, else Unsupported or Rejected.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as failure:
        raise _error("pidfd_open", failure.errno or errno.EINVAL) from failure


def duplicate(process: int, descriptor: int) -> int:
    """A duplicate of a descriptor of the process, with close-on-exec, to be closed by the caller.

    `process` is what `open_process` returns. Raises NotFound where the process has ended or has closed the
    descriptor; Unsupported before Linux 5.6, or where it is not permitted; else Rejected.
    """
    result = int(_libc.syscall(_PIDFD_GETFD, process, descriptor, 0))
    if result < 0:
        raise _error("pidfd_getfd", ctypes.get_errno())
    return result


def close(descriptor: int) -> None:
    """Close what `open_process` or `duplicate` returned."""
    os.close(descriptor)


def try_out() -> None:
    """Whether the kernel has the calls, by duplicating a descriptor that this process does not have.

    A process may always do that to itself, so this shows nothing of permissions. Raises Unsupported.
    """
    process = open_process(os.getpid())
    try:
        close(duplicate(process, _NO_DESCRIPTOR))
    except NotFound:
        pass  # the call is there
    finally:
        close(process)


def _error(call: str, number: int) -> KernelError:
    what = f"cannot call {call}: {os.strerror(number)}"
    if number in _GONE:
        failure: KernelError = NotFound(what)
    elif number == errno.ENOSYS:
        failure = Unsupported(what, "use Linux 5.6 or newer, and a seccomp profile that permits the call")
    elif number in (errno.EPERM, errno.EACCES):
        failure = Unsupported(what, "grant CAP_SYS_PTRACE, and set kernel.yama.ptrace_scope below 3")
    else:
        failure = Rejected(what)
    failure.__cause__ = OSError(number, os.strerror(number))
    return failure
