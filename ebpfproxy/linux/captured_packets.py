"""Packets that pass a device, from packet(7). A filter in the kernel selects those to one address."""

import contextlib
import socket
import time
from types import TracebackType

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.sockets import socket_filter
from ebpfproxy.model.address import Address

_ETH_P_ALL = 3
_LONGEST = 0xFFFF


class CapturedPackets:
    """The packets to one destination address that pass a device, in both directions, from the IP header on.

    A context manager. Packets that leave are captured behind the device's egress programs. Raises Rejected.
    """

    def __init__(self, device: str, destination: Address) -> None:
        try:
            with contextlib.ExitStack() as opened:
                self._socket = opened.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0))
                socket_filter.attach(self._socket, socket_filter.only_to(destination))
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
