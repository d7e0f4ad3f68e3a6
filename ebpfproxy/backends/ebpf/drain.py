"""Drains the eBPF backend after another backend has taken over the node: open connections continue.

The first step ends the translation of new connections. The order ensures that it rejects or drops no packet:

0. Each connection of a socket that a hook has redirected gets a conntrack entry (`track_sockets`).
1. The hooks that redirect sockets, or reject the bind() of a NodePort, are detached.
2. All bits of `service_ports` are cleared, in memory. The programs look there first (service_find() of
   bpf/service.h). From then on they find no frontend, so they neither select an endpoint nor reject packets.
3. The ServiceCIDRs are deleted, since the other backend decides on unused ClusterIPs.
4. `frontend_addresses` (replies to pings), `services` and `affinity` are emptied.

Known flows continue. The programs need the maps of flows, `devices`, `node` and `local_networks` for them.
These maps stay, as do the attachments to devices and the reinjection veth pair. A TCP connection ends once
both sides have closed it, or after the timeout in `node` without a packet. A repeated SYN is translated as
the first one was.

A UDP flow has no end, and a drained backend does not learn when its endpoint is removed. So the programs no
longer translate datagrams of clients; the other backend does. A UDP flow without an entry in `services` is
not in force (frontend_is_in_force() of bpf/flow.h). Datagrams of endpoints are translated as long as the
endpoint sends, since that needs no Service. So pending replies and streams arrive.

The hooks that translate addresses back for sockets are detached one step later, since replies to datagrams
may be pending. From then on getpeername() returns the endpoint. A connected socket keeps its endpoint. For
TCP that is correct until the connection ends. A UDP socket keeps it even after the endpoint is removed, and
its process gets no error.

Endpoints and names stay unchanged. If this backend is selected again, it finds both by their ids, and each
reference to them remains valid.

The complete state is in the pins. A step continues where the last one ended, even in another process.
"""

import contextlib
import time
from pathlib import Path
from socket import IPPROTO_UDP, ntohs

from ebpfproxy.backends.ebpf import abi, cleanup, programs
from ebpfproxy.backends.ebpf.flows.pairs import Pair, pairs
from ebpfproxy.backends.ebpf.flows.state import REPLY_GLANCE, columns, protocols
from ebpfproxy.backends.ebpf.flows.sweep import FlowMaps, FlowSweep
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.backends.ebpf.inspect.flow_view import read_timeouts
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.backends.ebpf.services import service_cidrs
from ebpfproxy.errors import AbiMismatch, KernelError, NotFound
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import State
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Protocol

log = Logger(__name__)

INCOMPATIBLE = "Ending connections of incompatible maps"
"""Maps of another version have other structs, so their flows cannot be read and end at once."""

NOT_TRACKED = "Failed to have conntrack know connections of sockets"
"""An endpoint may reset an idle connection of this mode, if its client connects to the frontend again from
the same port, and the next mode translates both to the same addresses and ports."""

_OPEN = State.ESTABLISHED, State.CLOSE_WAIT
_REVERSE_HOOKS = frozenset({"sock_release", "getpeername4", "getpeername6", "recvmsg4", "recvmsg6"})
_REDIRECTING_HOOKS = tuple(hook for hook in SOCKET_HOOKS if hook.name not in _REVERSE_HOOKS)
_FLAGS = columns(abi.FLOW, flags="H")
_LONGEST_SWEEP = 4.0  # seconds; shorter than a starting agent waits for the lock of the bpffs root
_LONGEST_REST = 0.05  # seconds


class Drain:
    """Drains the eBPF backend with this bpffs root.

    `cgroup_root` is only needed if the kernel has no cgroup links. The devices are those of the calling
    thread's network namespace, which no other agent may use. New devices get no programs.

    EbpfBackend may be opened and synced again between two steps.
    """

    def __init__(self, bpffs_root: Path, cgroup_root: Path | None, proc_root: Path = Path("/proc")) -> None:
        self._root = bpffs_root
        self._cgroup = cgroup_root
        self._proc_root = str(proc_root)

    def step(self) -> tuple[list[str], bool]:
        """Do one step. Return what was removed, one line each, and whether another step is needed.

        Call it again about ten seconds later. The module's docstring describes the first step. Each later
        step removes flows that are over. When no flow remains, it removes everything, as `cleanup.remove`
        does. The flows in maps of another version cannot be read, and end. Missing objects are no error.

        Raises Rejected if an agent uses this bpffs root, or if permissions are missing. Raises other
        KernelErrors if the kernel rejects a change. The next step then retries.
        """
        with cleanup.alone(self._root) as pins, contextlib.ExitStack() as opened:
            if pins is None:
                return cleanup.remove_held(None, self._cgroup), False
            try:
                opened_maps = [_opened(folder, opened) for folder in pins.loaded()]
            except (AbiMismatch, NotFound) as failure:
                log.warning(INCOMPATIBLE, reason=failure.message)
                return cleanup.remove_held(pins, self._cgroup), False
            removed = self._end_new_connections(pins, opened_maps)
            if removed:
                return removed, True
            removed = programs.detach_all(pins, self._cgroup)
            with_flows = [maps for maps in opened_maps if _has_flows(maps)]
            if with_flows:
                return removed, True
            return removed + cleanup.remove_held(pins, self._cgroup), False

    def _end_new_connections(self, pins: Pins, opened: list[Maps]) -> list[str]:
        """End the translation of new connections. Return what was removed; later calls return nothing."""
        for maps in opened:
            if any(True for _ in maps["services"].items()):
                track_sockets(maps, self._proc_root)
        removed = programs.detach_all(pins, self._cgroup, _REDIRECTING_HOOKS)
        for maps in opened:
            with contextlib.closing(maps["service_ports"].mapped()) as bits:
                bits[:] = bytes(len(bits))
            service_cidrs.delete(maps["local_networks"])
            emptied = {name: _empty(maps[name]) for name in ("frontend_addresses", "services", "affinity")}
            if emptied["services"]:
                removed.append(f"{emptied['services']} frontends")
        return removed


def _opened(folder: Path, stack: contextlib.ExitStack) -> Maps:
    """The maps that the programs of a folder use. The stack closes them.

    Raises AbiMismatch if they are of another version, NotFound if one is missing.
    """
    maps = Maps(folder / "maps")
    stack.callback(maps.close)
    return maps


def _empty(of: Map) -> int:
    """Delete all entries; return how many were deleted."""
    return sum(of.delete(key) for key, _ in list(of.items()))


def _has_flows(maps: Maps) -> bool:
    """Remove flows that are over; return whether a flow remains that needs these maps.

    With many flows this takes several calls. A reply entry without a flow counts, since its endpoint may
    still send. The sweep rests for half of the time, since no caller waits for it.
    """
    until = time.monotonic() + _LONGEST_SWEEP

    def rest(worked: float) -> bool:
        time.sleep(min(worked, _LONGEST_REST))
        return time.monotonic() > until

    timeouts = read_timeouts(maps["node"])
    with contextlib.closing(maps["endpoints"].mapped()) as endpoints:
        flows = FlowMaps(maps["flows"], maps["replies"], maps["established_flows"], endpoints)
        FlowSweep(flows, timeouts).run(rest)
    return any(not _is_direct_datagrams(pair) for pair in pairs(maps, timeouts))


def _is_direct_datagrams(pair: Pair) -> bool:
    """Whether it is a direct flow of UDP. The programs still create these, so they may never end.

    Without the flow, the next datagram keeps its own port, which the translating backend knows.
    """
    if protocols(pair.key)[0] != IPPROTO_UDP:
        return False
    flags = _FLAGS.unpack(pair.flow)[0] if pair.flow else REPLY_GLANCE.unpack(pair.reply or b"")[0]
    return bool(flags & abi.FLOW_DIRECT)


def track_sockets(maps: Maps, proc_root: str) -> None:
    """Add a conntrack entry for each TCP connection whose peer is an endpoint of `maps`.

    It searches the sockets of all network namespaces. The entries are added to the calling thread's network
    namespace. Rules there must use conntrack already, so that no active connection is missed.

    A redirected socket is connected to the endpoint itself. Conntrack has no entry for it if it was idle
    since the other mode enabled conntrack. The client may then connect to the frontend from the same port.
    Netfilter would translate that connection to the same tuple, and the endpoint would reset both. With the
    entry, netfilter selects another source port.
    """
    endpoints = _endpoints(maps)
    if not endpoints:
        return
    connections = []
    try:
        with contextlib.closing(namespaces.opened_network_namespaces(proc_root)) as descriptors:
            for descriptor in descriptors:
                with namespaces.in_namespace(descriptor):
                    found = sockets.read(Protocol.TCP, _OPEN, endpoints)
                connections += [
                    ((each.source, each.source_port), (each.destination, each.destination_port))
                    for each in found
                ]
        for rejected, count in conntrack.track_tcp(connections).items():
            log.warning(NOT_TRACKED, connections=count, reason=rejected.reason)
    except KernelError as failure:
        log.warning(NOT_TRACKED, reason=failure.message, hint=failure.hint)


def _endpoints(maps: Maps) -> set[tuple[Address, int]]:
    """Address and port (host order) of each endpoint in use, of any protocol."""
    with contextlib.closing(maps["endpoints"].mapped()) as entries:
        room = len(entries) // abi.ENDPOINT.size * abi.ENDPOINT.size  # the memory ends with a page
        found = abi.ENDPOINT.iter_unpack(entries[:room])
        return {(Address(address), ntohs(port)) for address, port, _, service in found if service}
