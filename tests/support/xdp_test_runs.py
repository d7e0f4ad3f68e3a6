"""Test runs of the XDP program."""

import struct

from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.test_run import TestRuns


class XdpTestRuns(TestRuns):
    """BPF_PROG_TEST_RUN of an XDP program with a context (5.15, 47316f4a3053). Verdicts are XDP_*.

    `ifindex`: the device that receives the packets, in the calling thread's network namespace. The program's
    redirects are not executed. `cb` has no meaning.
    """

    _CONTEXT = 24  # struct xdp_md
    _END = struct.Struct("=I")  # its `data_end`, the second field

    def __init__(self, program: Program, *, ifindex: int) -> None:
        super().__init__(program)
        struct.pack_into("=6I", self._before, 0, 0, 0, 0, ifindex, 0, 0)

    def run(self, packet: bytes) -> tuple[int, bytearray]:
        self._END.pack_into(self._before, 4, len(packet))
        return super().run(packet)
