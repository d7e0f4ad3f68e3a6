"""Waits until no BPF program that is running now still runs, as synchronize_rcu() does in the kernel."""

import struct

from ebpfproxy.linux.bpf.bpf import Map

_ARRAY, _ARRAY_OF_MAPS = 2, 12  # BPF_MAP_TYPE_*
_U32 = struct.Struct("=I")
_NAME = "ebpfproxy_grace"
"""What `bpftool map` shows. The maps are not pinned, so they end with the process."""


class GracePeriod:
    """Waits for a grace period by writing to an array of maps, which no program uses.

    The system call returns after synchronize_rcu(), so that user space knows that no program still uses the
    replaced map: maybe_wait_bpf_programs() in kernel/bpf/syscall.c (4.20, 1ae80cf31938). It waits even if the
    same map is written again. It covers programs at devices and socket hooks, which run in RCU read-side
    critical sections, but not sleepable programs.

    membarrier(MEMBARRIER_CMD_GLOBAL) is no replacement: with nohz_full it fails, and with one online CPU it
    returns at once, although a preempted program may still run (kernel/sched/membarrier.c).
    """

    def __init__(self) -> None:
        """Raises KernelError."""
        self._inner = Map.create(_ARRAY, 4, 4, 1, name=_NAME)
        try:
            self._outer = Map.create(_ARRAY_OF_MAPS, 4, 4, 1, name=_NAME, inner=self._inner)
        except BaseException:
            self._inner.close()
            raise

    def wait(self) -> None:
        """Wait, usually 5 to 30 ms. Raises KernelError."""
        self._outer.update(_U32.pack(0), _U32.pack(self._inner.fd))

    def close(self) -> None:
        self._outer.close()
        self._inner.close()
