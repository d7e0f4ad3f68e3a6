"""Runs a classifier or an XDP program on given packets, by BPF_PROG_TEST_RUN of bpf(2). For probes,
tests and measurements."""

import ctypes
import struct
from typing import NamedTuple

from ebpfproxy.linux.bpf.bpf import PROG_TEST_RUN, Program, error, syscall_number

_libc = ctypes.CDLL(None, use_errno=True)


class RunResult(NamedTuple):
    """The result of a run: the verdict and the changed packet.

    `verdict` is signed, since TC_ACT_UNSPEC is -1. `cb` is the first word of the packet's control block.
    `duration_ns` includes the kernel's own cost of a run.
    """

    verdict: int
    packet: bytes
    duration_ns: int
    cb: int


class TestRuns:
    """BPF_PROG_TEST_RUN of a classifier (4.12, 1cf1cae963c2; with a context 5.0, b0b9395d865e).

    A packet begins with an Ethernet header for every type of device, since that header contains its protocol.
    All buffers are created once: a run costs 4 us in addition to the program.

    - `ifindex`: a device in the calling thread's network namespace. 0: its loopback.
    - `ingress_ifindex`: the device at which a leaving packet arrived. 0: it is host-originated.
    - `cb`: the first word of the control block.
    """

    __test__ = False  # not a test case of pytest
    _ROOM = 1 << 16
    _CONTEXT = 192  # struct __sk_buff of 5.18 (f6d60facd9b6); a longer one is filled with zeros
    _CONTEXT_ROOM = 192
    _SIZES = struct.Struct("=IIII")  # union bpf_attr: prog_fd, retval, data_size_in, data_size_out
    _TEST = struct.Struct("=QQIIIIQQIII4x")  # the rest of its `test`
    _RESULT = struct.Struct("=4xiII")

    def __init__(self, program: Program, *, ifindex: int = 0, ingress_ifindex: int = 0, cb: int = 0) -> None:
        self._name, self._fd = program.name, program.fd
        self._call = _libc["syscall"]  # a separate function object with types halves the time of a call
        self._call.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long)
        self._call.restype = ctypes.c_long
        self._number = syscall_number()
        sizes = self._SIZES.size + self._TEST.size, *[self._ROOM] * 2, *[self._CONTEXT_ROOM] * 2
        self._attr, self._in, self._out, self._before, self._after = (bytearray(size) for size in sizes)
        self._at, *self._addresses = map(
            self._address, (self._attr, self._in, self._out, self._before, self._after)
        )
        struct.pack_into("=II4xI", self._before, 36, ingress_ifindex, ifindex, cb)
        self._prepare(1)

    @staticmethod
    def _address(buffer: bytearray) -> int:
        """The address of a buffer. Its size must not change afterwards."""
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    def _prepare(self, repeat: int) -> None:
        """Write the part of the attributes that the kernel only reads, except for the size of the context."""
        data_in, data_out, before, after = self._addresses
        context = self._CONTEXT
        values = (data_in, data_out, repeat, 0, context, context, before, after, 0, 0, 0)
        self._TEST.pack_into(self._attr, self._SIZES.size, *values)

    def run(self, packet: bytes) -> tuple[int, bytearray]:
        """The verdict and the changed packet. It is the fast way, for millions of runs.

        Raises Rejected if the packet has less than 14 bytes, or more than the kernel accepts (a page minus
        400 bytes).
        """
        size = len(packet)
        self._SIZES.pack_into(self._attr, 0, self._fd, 0, size, self._ROOM)
        self._in[:size] = packet
        if self._call(self._number, PROG_TEST_RUN, self._at, len(self._attr)) < 0:
            raise error(ctypes.get_errno(), f"cannot run {self._name} on a packet of {size} bytes")
        verdict, _, size = self._RESULT.unpack_from(self._attr)
        return verdict, self._out[:size]

    def measure(self, packet: bytes, repeat: int = 1) -> RunResult:
        """Like `run`, with all results. After several runs, the packet is that of the last one."""
        self._prepare(repeat)
        try:
            verdict, changed = self.run(packet)
            duration = int(struct.unpack_from("=I", self._attr, 36)[0])
        finally:
            self._prepare(1)
        return RunResult(verdict, bytes(changed), duration, self.cb)

    @property
    def cb(self) -> int:
        """The first word of the control block, as the last run left it."""
        return int(struct.unpack_from("=I", self._after, 48)[0])

    @cb.setter
    def cb(self, value: int) -> None:
        """Set it for later runs."""
        struct.pack_into("=I", self._before, 48, value)
