"""Packets that pass a device, from packet(7). A filter in the kernel selects those to one address."""

import contextlib
import ctypes
import socket
import struct
import time
from types import TracebackType

from ebpfproxy.errors import Rejected
from ebpfproxy.model.address import V4_PREFIX, Address, Family, family

_ETH_P_ALL = 3
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_ALU|BPF_AND|BPF_K, BPF_JMP|BPF_JEQ|BPF_K and BPF_RET|BPF_K."""
_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter
_LONGEST = 0xFFFF


class CapturedPackets:
    """The packets to one destination address that pass a device, in both directions, from the IP header on.

    A context manager. Packets that leave are captured behind the device's egress programs. Raises Rejected.
    """

    def __init__(self, device: str, destination: Address) -> None:
        code = ctypes.create_string_buffer(_filter(destination))
        program = struct.pack("@HP", len(code) // _INSTRUCTION.size, ctypes.addressof(code))
        try:
            with contextlib.ExitStack() as opened:
                self._socket = opened.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0))
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                self._socket.bind((device, _ETH_P_ALL))
                opened.pop_all()
        except OSError as error:
            raise Rejected(f"cannot capture packets of {device}: {error.strerror}", "run as root") from error

    def __enter__(self) -> "CapturedPackets":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    @property
    def hardware_address(self) -> bytes:
        """That of the device."""
        return bytes(self._socket.getsockname()[4])

    def next(self, deadline: float) -> bytes | None:
        """The next packet; None if there is none until `deadline` (of time.monotonic())."""
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            return self._socket.recv(_LONGEST)
        except TimeoutError:
            return None


def _filter(destination: Address) -> bytes:
    """Compares the words of the destination address in the header of its family."""
    is_v4 = family(destination) is Family.IPV4
    raw, at = (destination[len(V4_PREFIX) :], 16) if is_v4 else (destination, 24)
    words = struct.unpack(f">{len(raw) // 4}I", raw)
    first = (4 if is_v4 else 6) << 28
    code = [
        (_LOAD_WORD, 0, 0, 0),
        (_AND, 0, 0, 0xF0000000),  # the version
        (_IF_EQUAL, 0, 2 * len(words) + 1, first),
    ]
    for index, word in enumerate(words):
        code.append((_LOAD_WORD, 0, 0, at + 4 * index))
        code.append((_IF_EQUAL, 0, 2 * (len(words) - index) - 1, word))
    code += [(_RETURN, 0, 0, _LONGEST), (_RETURN, 0, 0, 0)]
    return b"".join(_INSTRUCTION.pack(*each) for each in code)
