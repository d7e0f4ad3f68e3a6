"""The one entry of the map `node`: what holds for all programs."""

import dataclasses
import struct
import threading

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import reinjection
from ebpfproxy.log import Logger
from ebpfproxy.plan.service_plan import SocketLb

log = Logger(__name__)

NODE_REPAIRED = "Restored the node's entry"
"""Another program changed the map `node`, or the reinjection veth pair."""
NODE_NOT_REPAIRED = "Failed to restore the node's entry, retrying"
"""The map `node`, or the reinjection veth pair."""

_KEY = struct.pack("=I", 0)
_ICMP = {"net/ipv4/icmp_msgs_per_sec": 1000, "net/ipv4/icmp_msgs_burst": 50}
"""Sysctls that limit ICMP errors, and the kernel's first defaults (4cdf507d5452, 3.18), which apply where a
network namespace does not have these sysctls."""


class NodeEntry:
    """Written when the dataplane is opened, and again where another process changed it.

    What a former run's settings gave and these take away (the sockets of pods, the inlet) is kept until
    `settle`: until then nothing else may translate packets.
    """

    def __init__(self, node: Map, settings: EbpfSettings, netns_cookie: int) -> None:
        self._map = node
        self._settings = settings
        self._cookie = netns_cookie
        self._lock = threading.Lock()  # of the map, and of what is written there
        _, flags, former_inlet, *_ = abi.NODE.unpack(node.lookup(_KEY) or bytes(abi.NODE.size))
        self._kept_flags = flags & abi.NODE_SOCKETS_OF_PODS
        self._noted = flags & (abi.NODE_NETFILTER_FLOWS | abi.NODE_STALE_SOCKETS)
        self._icmp = _read_icmp_limits()
        self._kept_inlet = former_inlet
        self._inlet = former_inlet

    def write(self) -> bool:
        """Have the inlet where it is needed, and the entry; whether that was not as it should be.

        Raises KernelError.
        """
        if self._has_inlet:
            self._inlet = reinjection.ensure_inlet()
        self._icmp = _read_icmp_limits()
        return self._write()

    def _write(self) -> bool:
        """Whether the entry was another one. Raises KernelError."""
        with self._lock:
            wanted = self._wanted()
            if self._map.lookup(_KEY) == wanted:
                return False
            self._map.update(_KEY, wanted)
            return True

    def repair(self) -> None:
        """As `write`, but an inlet that cannot be had is logged: Services are no better off without the rest.

        Raises KernelError where the map cannot be written.
        """
        try:
            if self.write():
                log.warning(NODE_REPAIRED)
        except KernelError as failure:
            log.warning(
                NODE_NOT_REPAIRED,
                reason=failure.message,
                hint=failure.hint,
            )
            self._write()

    def settle(self) -> None:
        """Everything else is in force: let go of what only a former run needed. Raises KernelError.

        Where the devices are none of ours to look after, an inlet is left to whose it is now.
        """
        self._kept_flags = self._kept_inlet = 0
        self._write()
        if self._settings.devices and not self._has_inlet:
            reinjection.remove_inlet()

    def note_netfilter_flows(self, present: bool) -> None:
        """Whether the programs look into `netfilter_flows`. For any thread. Raises KernelError."""
        self._note(abi.NODE_NETFILTER_FLOWS, present)

    def note_stale_sockets(self, present: bool) -> None:
        """Whether the programs look into `stale_sockets`. For any thread. Raises KernelError."""
        self._note(abi.NODE_STALE_SOCKETS, present)

    def _note(self, flag: int, present: bool) -> None:
        with self._lock:
            self._noted = self._noted | flag if present else self._noted & ~flag
        self._write()

    @property
    def _has_inlet(self) -> bool:
        return self._settings.devices and self._settings.socket_lb is SocketLb.OFF

    def _wanted(self) -> bytes:
        settings = self._settings
        flags = self._kept_flags | self._noted
        device = self._inlet if self._has_inlet else self._kept_inlet
        if settings.socket_lb is SocketLb.ON:
            flags |= abi.NODE_SOCKETS_OF_PODS
        if settings.redirect:
            flags |= abi.NODE_REDIRECT
        timeouts = dataclasses.astuple(settings.timeouts)
        return abi.NODE.pack(self._cookie, flags, device, *timeouts, *self._icmp)


def _read_icmp_limits() -> tuple[int, ...]:
    """ICMP errors per second, and at once; 0: no limit. Of the calling thread's network namespace."""
    return tuple(_read_number(name, default) for name, default in _ICMP.items())


def _read_number(name: str, default: int) -> int:
    try:
        return max(0, int(sysctl.read(name)))
    except (KernelError, ValueError):
        return default
