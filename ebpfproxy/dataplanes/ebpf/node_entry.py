"""The one entry of the map `node`: what holds for all programs."""

import dataclasses
import struct

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.settings import EbpfSettings
from ebpfproxy.kernel import inlet
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.plan.service_plan import SocketLb

_KEY = struct.pack("=I", 0)


class NodeEntry:
    """Written when the dataplane is opened, and again where somebody changed it.

    What a former run's settings gave and these take away (the sockets of pods, the inlet) is kept until
    `settle`: until then packets may have nobody else to translate them.
    """

    def __init__(self, node: Map, settings: EbpfSettings, netns_cookie: int) -> None:
        self._map = node
        self._settings = settings
        self._cookie = netns_cookie
        _, flags, former_inlet, *_ = abi.NODE.unpack(node.lookup(_KEY) or bytes(abi.NODE.size))
        self._kept_flags = flags & abi.NODE_SOCKETS_OF_PODS
        self._kept_inlet = former_inlet

    def write(self) -> bool:
        """Whether it was not as it should be. Raises KernelError."""
        wanted = self._wanted()
        if self._map.lookup(_KEY) == wanted:
            return False
        self._map.update(_KEY, wanted)
        return True

    def settle(self) -> None:
        """Everything else is in force: let go of what only a former run needed. Raises KernelError."""
        self._kept_flags = self._kept_inlet = 0
        self.write()
        if self._settings.socket_lb is not SocketLb.OFF:
            inlet.remove_inlet()

    def _wanted(self) -> bytes:
        settings = self._settings
        flags, device = self._kept_flags, self._kept_inlet
        if settings.socket_lb is SocketLb.ON:
            flags |= abi.NODE_SOCKETS_OF_PODS
        if settings.redirect:
            flags |= abi.NODE_REDIRECT
        if settings.socket_lb is SocketLb.OFF:
            device = inlet.ensure_inlet()
        timeouts = dataclasses.astuple(settings.timeouts)
        return abi.NODE.pack(self._cookie, flags, device, *timeouts)
