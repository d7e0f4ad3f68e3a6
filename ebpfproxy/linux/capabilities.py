"""Capabilities of the calling thread, and whether a seccomp filter applies to its system calls.

Sources: capabilities(7), seccomp(2); proc_pid_status(5) for CapEff and Seccomp.
"""

from pathlib import Path

from ebpfproxy.errors import Rejected

NET_ADMIN, SYS_ADMIN, PERFMON, BPF = "CAP_NET_ADMIN", "CAP_SYS_ADMIN", "CAP_PERFMON", "CAP_BPF"
SYS_PTRACE, NET_BIND_SERVICE = "CAP_SYS_PTRACE", "CAP_NET_BIND_SERVICE"

_STATUS = Path("/proc/thread-self/status")
_BITS = {NET_BIND_SERVICE: 10, NET_ADMIN: 12, SYS_PTRACE: 19, SYS_ADMIN: 21, PERFMON: 38, BPF: 39}
# PERFMON, BPF: since Linux 5.8
_FILTER = 2  # SECCOMP_MODE_FILTER


def capabilities() -> frozenset[str]:
    """The effective capabilities among the names above; in a user namespace they may permit less.

    Raises Rejected.
    """
    effective = int(_field("CapEff"), 16)
    return frozenset(name for name, bit in _BITS.items() if effective >> bit & 1)


def is_filtered() -> bool:
    """Whether a seccomp filter applies to the thread's system calls. Raises Rejected."""
    return int(_field("Seccomp") or 0) == _FILTER  # a kernel without seccomp has no such line


def _field(name: str) -> str:
    """The value of a line in /proc/thread-self/status; empty if the kernel does not report it."""
    try:
        text = _STATUS.read_text()
    except OSError as failure:
        raise Rejected(f"cannot read {_STATUS}: {failure.strerror}") from failure
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")
