"""A short SYN retransmission timeout for TCP connections.

On one machine an ICMP rejection arrives while the first SYN is still being sent. The kernel then ignores it
(tcp_v4_err, LINUX_MIB_LOCKDROPPEDICMPS), and sends the next SYN after a second.
"""

from pathlib import Path

from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.linux.bpf.bpf import Program

_SOCK_OPS, _CGROUP_SOCK_OPS = 13, 3  # BPF_PROG_TYPE_, BPF_
_JIFFIES = 10
_CODE = bytes.fromhex(
    "b700000001000000"  # r0 = 1
    "6112000000000000"  # r2 = the operation
    "5502020001000000"  # if it is not BPF_SOCK_OPS_TIMEOUT_INIT, pass on
    f"b7030000{_JIFFIES:02x}000000"
    "6331040000000000"  # reply = r3
    "9500000000000000"
)
"""BPF code in the byte order of x86 and arm64."""


def try_again_soon(of: Path) -> None:
    """Apply it to all sockets of this cgroup, as long as it exists. Raises KernelError."""
    program = Program.load(_SOCK_OPS, _CGROUP_SOCK_OPS, _CODE)
    try:
        cgroup.attach_multi(program, of, _CGROUP_SOCK_OPS, None)
    finally:
        program.close()
