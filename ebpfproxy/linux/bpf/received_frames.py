"""Lets a device receive frames, as if they had arrived from its network.

BPF_PROG_TEST_RUN of an XDP program with BPF_F_TEST_XDP_LIVE_FRAMES (5.18, b530e9e1063e "bpf: Add "live
packet" mode for XDP in BPF_PROG_RUN"). The program passes every frame. It is not attached to the device.
"""

import ctypes
import errno
import struct
from types import TracebackType

from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.bpf.bpf import PROG_TEST_RUN, Program, bpf, errno_of

_PROG_TYPE_XDP = 6
_LIVE_FRAMES = 1 << 1
_PASS = struct.pack("=BBhi", 0xB7, 0, 0, 2) + struct.pack("=BBhi", 0x95, 0, 0, 0)  # return XDP_PASS
_CONTEXT = struct.Struct("=IIIIII")  # struct xdp_md
_TEST = struct.Struct("=IIIIQQIIIIQQIII4x")  # union bpf_attr, `test`


class ReceivedFrames:
    """A device, by ifindex in the calling thread's network namespace, that receives frames. A context
    manager.

    Raises Unsupported before Linux 5.18, Rejected without CAP_BPF and CAP_NET_ADMIN.
    """

    def __init__(self, ifindex: int) -> None:
        self._ifindex = ifindex
        self._program = Program.load(_PROG_TYPE_XDP, 0, _PASS, "ebpfproxy_pass")

    def __enter__(self) -> "ReceivedFrames":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._program.close()

    def receive(self, frame: bytes) -> None:
        """Let the device receive one frame, which begins with an Ethernet header."""
        data = ctypes.create_string_buffer(frame, len(frame))
        context = ctypes.create_string_buffer(
            _CONTEXT.pack(0, len(frame), 0, self._ifindex, 0, 0), _CONTEXT.size
        )
        attr = _TEST.pack(
            *(self._program.fd, 0, len(frame), 0, ctypes.addressof(data), 0),
            *(1, 0, _CONTEXT.size, 0, ctypes.addressof(context), 0),
            *(_LIVE_FRAMES, 0, 0),
        )
        try:
            bpf(PROG_TEST_RUN, attr, f"cannot let the device {self._ifindex} receive a frame")
        except KernelError as failure:
            if errno_of(failure) == errno.EINVAL:
                hint = "use Linux 5.18 or later"
                raise Unsupported(f"{failure.message}: no live frames", hint) from failure
            raise
