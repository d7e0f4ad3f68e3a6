"""The single entry of the map `node`: settings and state of the node that apply to all programs."""

import dataclasses
import struct
import threading

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.services import service_cidrs
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import geneve, reinjection
from ebpfproxy.log import Logger
from ebpfproxy.plan.service_plan import SocketLb

log = Logger(__name__)

NODE_REPAIRED = "Restored the node's entry"
"""Another program changed the map `node`, the reinjection veth pair, or the Geneve device."""
NODE_NOT_REPAIRED = "Failed to restore the node's entry, retrying"
"""The map `node` could not be written, or the reinjection veth pair or Geneve device could not be created."""

_KEY = struct.pack("=I", 0)
_FIELDS = tuple(field.name for field in abi.NODE.fields)
_ICMP = {"net/ipv4/icmp_msgs_per_sec": 1000, "net/ipv4/icmp_msgs_burst": 50}
"""Sysctls that limit ICMP errors, and the kernel's original defaults (4cdf507d5452, 3.18). The defaults apply
in a network namespace without these sysctls."""


class NodeEntry:
    """Writes the entry when the backend is opened, and again if another process changed it.

    Features of a previous run that these settings lack stay until `settle`: redirected sockets of pods, and
    the reinjection veth pair. Until then nothing else may translate those packets. A Geneve device also stays
    until then, but gets no more packets.
    """

    def __init__(self, node: Map, settings: EbpfSettings, netns_cookie: int, networks: Map) -> None:
        """`networks`: the map `local_networks`, which has the ServiceCIDRs."""
        self._map = node
        self._settings = settings
        self._cookie = netns_cookie
        self._lock = threading.Lock()  # for the map and the fields from which its entry is made
        before = _fields(node.lookup(_KEY) or bytes(abi.NODE.size))
        self._kept_flags = before["flags"] & abi.NODE_SOCKETS_OF_PODS
        self._noted = before["flags"] & (abi.NODE_NETFILTER_FLOWS | abi.NODE_STALE_SOCKETS)
        self._icmp = _read_icmp_limits()
        self._kept_reinjection = self._reinjection = before["reinjection_device"]
        self._loopback = settings.socket_lb is SocketLb.OFF
        self._networks = networks
        self._service_cidrs = service_cidrs.bounds(service_cidrs.read(networks))
        self.tunnel_device = 0
        """The ifindex of the Geneve device after `write`; 0: no direct server return.

        It stays while the device cannot be created, since a later one gets it again.
        """
        self.has_tunnel = False
        """Whether the device exists, as far as `write` knows. Without it, packets are translated."""
        self._tunnel_mtu = 0
        self._tunnel_before = before["tunnel_device"]

    def write(self) -> bool:
        """Provide the reinjection veth pair and the Geneve device if they are needed, and write the entry.

        Returns whether the entry differed. Raises KernelError.
        """
        if self._has_reinjection:
            self._reinjection = reinjection.ensure_pair()
        if self._settings.tunnels:
            self._provide_tunnel()
        self._icmp = _read_icmp_limits()
        return self._write()

    def _provide_tunnel(self) -> None:
        """`has_tunnel` changes only once the result is known, because another thread may write the entry."""
        self._tunnel_mtu = geneve.path_mtu() - abi.TUNNEL_OVERHEAD
        wanted = self.tunnel_device or self._tunnel_before
        try:
            self.tunnel_device = geneve.ensure(self._settings.dsr_port, wanted)
        except KernelError:
            self.has_tunnel = False
            raise
        self.has_tunnel = True

    def _write(self) -> bool:
        """Write the entry if it differs; return whether it did. Raises KernelError."""
        with self._lock:
            wanted = self._wanted()
            if self._map.lookup(_KEY) == wanted:
                return False
            self._map.update(_KEY, wanted)
            return True

    def holds(self) -> bool:
        """Whether the map has the entry, and the Geneve device exists. Raises KernelError."""
        if self._settings.tunnels and not (self.has_tunnel and geneve.find() == self.tunnel_device):
            return False
        with self._lock:
            return self._map.lookup(_KEY) == self._wanted()

    def difference(self, loopback: bool) -> str:
        """What differs from the entry of an agent that has settled, "" if nothing. Changes nothing.

        `loopback`: whether loopback has a program.

        Only for an object that never wrote. It does not compare `icmp_*`: the agent reads these sysctls only
        when it writes. Raises KernelError.
        """
        self._kept_flags = self._kept_reinjection = 0
        self._loopback |= loopback
        self._reinjection = reinjection.find_pair() if self._has_reinjection else 0
        if self._settings.tunnels:
            self.tunnel_device = geneve.find()
            self.has_tunnel = self.tunnel_device != 0
            self._tunnel_mtu = geneve.path_mtu() - abi.TUNNEL_OVERHEAD
        have, want = _fields(self._map.lookup(_KEY) or bytes(abi.NODE.size)), _fields(self._wanted())
        names = (name for name in _FIELDS if have[name] != want[name] and not name.startswith("icmp_"))
        return "; ".join(f"{name}: have {have[name]}; want {want[name]}" for name in names)

    def repair(self) -> None:
        """Like `write`. If a device cannot be created, that is logged, and the entry is written anyway.

        Raises KernelError if the map cannot be written.
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
        """Remove what only a previous run needed. Call it once everything else is in force.

        If this agent does not manage devices, a veth pair stays, since another agent may use it. Raises
        KernelError.
        """
        self._kept_flags = self._kept_reinjection = 0
        self._write()
        if self._settings.devices and not self._has_reinjection:
            reinjection.remove_pair()
        if self._settings.devices and not self._settings.tunnels:
            geneve.remove()

    def note_netfilter_flows(self, present: bool) -> None:
        """Set whether the programs use `netfilter_flows`. For any thread. Raises KernelError."""
        self._note(abi.NODE_NETFILTER_FLOWS, present)

    def note_stale_sockets(self, present: bool) -> None:
        """Set whether the programs use `stale_sockets`. For any thread. Raises KernelError."""
        self._note(abi.NODE_STALE_SOCKETS, present)

    def note_loopback(self, present: bool) -> None:
        """Set whether loopback has a program; then the node's packets need the reinjection veth pair.

        Call it before loopback gets its program, and after loopback has lost it. Raises KernelError.
        """
        wanted = present or self._settings.socket_lb is SocketLb.OFF
        if wanted != self._loopback:
            self._loopback = wanted
            self.write()

    def note_service_cidrs(self) -> None:
        """Set the networks in which the programs look for ServiceCIDRs. Call it when these have changed,
        after their Services are in force. Raises KernelError.
        """
        with self._lock:
            self._service_cidrs = service_cidrs.bounds(service_cidrs.read(self._networks))
        self._write()

    def _note(self, flag: int, present: bool) -> None:
        with self._lock:
            self._noted = self._noted | flag if present else self._noted & ~flag
        self._write()

    @property
    def _has_reinjection(self) -> bool:
        return self._settings.devices and self._loopback

    def _wanted(self) -> bytes:
        settings = self._settings
        flags = self._kept_flags | self._noted
        device = self._reinjection if self._has_reinjection else self._kept_reinjection
        if settings.socket_lb is SocketLb.ON:
            flags |= abi.NODE_SOCKETS_OF_PODS
        if settings.redirect:
            flags |= abi.NODE_REDIRECT
        timeouts = dataclasses.astuple(settings.timeouts)
        tunnel = self.tunnel_device if self.has_tunnel else 0, self._tunnel_mtu
        return abi.NODE.pack(
            self._cookie, flags, device, *timeouts, *self._icmp, *tunnel, *self._service_cidrs
        )


def _fields(entry: bytes) -> dict[str, int]:
    return dict(zip(_FIELDS, abi.NODE.unpack(entry), strict=True))


def _read_icmp_limits() -> tuple[int, ...]:
    """The limits of ICMP errors per second and per burst, in the calling thread's network namespace. 0: no
    limit."""
    return tuple(_read_number(name, default) for name, default in _ICMP.items())


def _read_number(name: str, default: int) -> int:
    try:
        return max(0, int(sysctl.read(name)))
    except (KernelError, ValueError):
        return default
