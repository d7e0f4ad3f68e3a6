"""Leaving a node to another dataplane, which serves there already, without ending what is under way.

The first step takes away all by which something new becomes ours, in such an order that no packet is refused
or dropped for it:

0. conntrack gets an entry for each connection of the hooks' sockets (sockets/tracking.py);
1. the hooks that send sockets elsewhere, or keep the node from binding a port;
2. the bits of `service_ports`, in memory. A packet asks them first (service_find() of bpf/service.h), and
   from then on no frontend is found, so that neither an endpoint is chosen nor anybody refused;
3. `frontend_addresses`, by which pings are answered; `services`; and `affinity`.

Flows that are known continue: what the programs need of them is in the maps of flows, `devices`, `node` and
`local_networks`, and these stay, as do filters and inlet. A TCP connection lives until both sides have closed
it, or as long without a packet as `node` says. A SYN that is sent again goes where the first one went.

UDP never ends by itself, and nothing would notice here that an endpoint goes. So what a client sends is let
go at once: with its entry of `services` a datagram's flow is in force no more (frontend_is_in_force() of
bpf/admit.h), and it passes on to the other dataplane. What an endpoint sends is given back for as long as it
does, since that needs no Service: answers under way, and streams.

What gives addresses back to sockets goes one step later, for the datagrams whose answers were under way.
From then on getpeername() returns the endpoint. A connected socket keeps its endpoint: of TCP until it ends,
which is right. A UDP socket does so also where that endpoint goes later, unnoticed.

Endpoints and names stay as they are: if this dataplane is chosen again, it finds both by their ids, and
a reference to one of them still means the same.

All of it is in the pins. A step picks up where the last one ended, be that another process's.
"""

import contextlib
import time
from pathlib import Path
from socket import IPPROTO_UDP

from ebpfproxy.backends.ebpf import abi, cleanup, programs
from ebpfproxy.backends.ebpf.flows.pairs import Pair, pairs
from ebpfproxy.backends.ebpf.flows.state import REPLY_GLANCE, columns, protocols
from ebpfproxy.backends.ebpf.flows.sweep import FlowMaps, FlowSweep
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.backends.ebpf.inspect.flow_view import read_timeouts
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.pins import Pins, is_versioned
from ebpfproxy.backends.ebpf.sockets.tracking import track_sockets
from ebpfproxy.errors import AbiMismatch, NotFound
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.log import Logger

log = Logger(__name__)

INCOMPATIBLE = "Ending connections of incompatible maps"
"""Maps of another version have other structs; flows in them cannot be waited for."""

_GIVING_BACK = frozenset({"sock_release", "getpeername4", "getpeername6", "recvmsg4", "recvmsg6"})
_TAKING = tuple(hook for hook in SOCKET_HOOKS if hook.name not in _GIVING_BACK)
_FLAGS = columns(abi.FLOW, flags="H")
_LONGEST_SWEEP = 4.0  # seconds, less than an agent waits that is to have the bpffs root
_LONGEST_REST = 0.05  # seconds


class Drain:
    """Of the eBPF dataplane with this bpffs root. `cgroup_root` is only needed where the kernel has no cgroup
    links. Devices are those of the calling thread's network namespace, which no other agent has; nothing
    looks after new ones.

    Until nothing is left, EbpfBackend may be opened and synced again at any time between two steps.
    """

    def __init__(self, bpffs_root: Path, cgroup_root: Path | None, proc_root: Path = Path("/proc")) -> None:
        self._root = bpffs_root
        self._cgroup = cgroup_root
        self._proc_root = str(proc_root)

    def step(self) -> tuple[list[str], bool]:
        """What was removed, a line each, and whether something is left for another step, in some ten seconds.

        The first one is described above. Each further one removes flows that are over; where none is left,
        everything goes as by `removal.remove`. Maps that are not like ours tell nothing of their flows, which
        therefore end. What is not there is no error, be it all of it.

        Raises Rejected while an agent has this bpffs root, and where we may not; other KernelErrors where the
        kernel refuses something. The next step then tries again.
        """
        with cleanup.alone(self._root) as pins, contextlib.ExitStack() as opened:
            if pins is None:
                return cleanup.remove_held(None, self._cgroup), False
            try:
                opened_maps = [_opened(folder, opened) for folder in pins.loaded()]
            except (AbiMismatch, NotFound) as failure:
                log.warning(INCOMPATIBLE, reason=failure.message)
                return cleanup.remove_held(pins, self._cgroup), False
            removed = self._let_go(pins, opened_maps)
            if removed:
                return removed, True
            removed = programs.detach_all(pins, self._cgroup)
            having_flows = [maps for maps in opened_maps if _has_flows(maps)]
            if having_flows:
                return removed, True
            return removed + cleanup.remove_held(pins, self._cgroup), False

    def _let_go(self, pins: Pins, opened: list[Maps]) -> list[str]:
        """Have nothing new become ours; what that took, nothing after the first time."""
        for maps in opened:
            if any(True for _ in maps["services"].items()):
                track_sockets(maps, self._proc_root)
        removed = programs.detach_all(pins, self._cgroup, _TAKING)
        for maps in opened:
            with contextlib.closing(maps["service_ports"].mapped()) as bits:
                bits[:] = bytes(len(bits))
            emptied = {name: _empty(maps[name]) for name in ("frontend_addresses", "services", "affinity")}
            if emptied["services"]:
                removed.append(f"{emptied['services']} frontends")
        return removed


def _opened(folder: Path, stack: contextlib.ExitStack) -> Maps:
    """The maps that the programs of a folder use, to be closed by the stack.

    Raises AbiMismatch where they are those of another version, NotFound where one is gone.
    """
    if not is_versioned(folder):
        raise AbiMismatch(f"{folder.name} is of version 0.1")
    maps = Maps(folder / "maps")
    stack.callback(maps.close)
    return maps


def _empty(of: Map) -> int:
    """Delete all that it has; how much that was."""
    return sum(of.delete(key) for key, _ in list(of.items()))


def _has_flows(maps: Maps) -> bool:
    """Whether a flow is left that needs these maps after those that are over were removed; where these are
    many, that takes several calls. A reply without a flow counts, since its endpoint may still send. The
    sweep works for half of the time: no caller waits for it."""
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
    """Whether it is a direct flow of UDP: programs still open these, and they may never end. Without the
    flow the next datagram keeps its own port, which the dataplane that translates it knows."""
    if protocols(pair.key)[0] != IPPROTO_UDP:
        return False
    flags = _FLAGS.unpack(pair.flow)[0] if pair.flow else REPLY_GLANCE.unpack(pair.reply or b"")[0]
    return bool(flags & abi.FLOW_DIRECT)
