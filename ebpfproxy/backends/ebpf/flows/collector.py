"""A thread that reads the packet path's maps. It removes flows that are over, and reports pods that bypass
all programs of this backend.
"""

import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ebpfproxy import threads
from ebpfproxy.backends.ebpf.flows.connections import Connections
from ebpfproxy.backends.ebpf.flows.netfilter_flows import NetfilterFlows
from ebpfproxy.backends.ebpf.flows.state import FlowTimeouts
from ebpfproxy.backends.ebpf.flows.sweep import FlowMaps, FlowSweep, Swept
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.log import Logger

log = Logger(__name__)

COLLECTED = "Collected flows"
"""Flows that are over were removed."""
PODS_UNREAD = "Cannot search pods that bypass the socket hooks"
"""Retried at the collector's next turn; forwarding does not depend on it."""
COLLECT_FAILED = "Cannot collect flows"
"""Retried at the collector's next turn; forwarding does not depend on it."""
PORTS_UNREAD = "Cannot look up the connections that netfilter masquerades"
"""Their ports stay reserved until the next turn."""

_MAPS = (
    *("flows", "replies", "established_flows", "bypassing"),
    *("endpoints", "connections", "socket_peers"),
)
_POLL = 1.0  # seconds between reads of `bypassing`: the delay until a bypassing pod is served
_SHORTEST, _LONGEST = 10.0, 60.0  # seconds between walks
_CHANGED = 0.05  # if a larger part of all entries was removed, the next walk follows soon
_FULL = 0.75  # if a larger part of the capacity is in use, the next walk does not follow later
_CROWDED = 1 / 3  # of all entries, in use by one kind of flows: about half of what it may use
_CROWDED_SHORTEST = 2.0  # as _SHORTEST, if many entries were removed while one kind uses more than that
_REST_FACTOR = 3  # it rests 3 times as long as it works, so a walk takes a quarter of a CPU
_LONGEST_REST = 0.05  # seconds
_PATIENCE = 5.0  # seconds that `close` waits for a step that cannot be interrupted
_IFINDEX = struct.Struct("=I")
_SIGNED = struct.Struct("=i")  # the programs may subtract flows that the last walk did not count


class Collected(NamedTuple):
    """Results of all walks. `entries` and `half_open`: the established and half-open flows that remain after
    the last walk. The other numbers are sums since the start. See `Swept`."""

    entries: int = 0
    half_open: int = 0
    expired: int = 0
    retired: int = 0
    orphaned: int = 0
    busy: int = 0

    def events(self) -> dict[str, int]:
        """By counter name. They are reported together with the programs' counters."""
        return {
            "flow_expired": self.expired,
            "flow_retired": self.retired,
            "flow_orphaned": self.orphaned,
            "flow_walk_busy": self.busy,
        }

    def plus(self, swept: Swept) -> "Collected":
        return Collected(
            swept.entries,
            swept.half_open,
            self.expired + swept.expired,
            self.retired + swept.retired,
            self.orphaned + swept.orphaned,
            self.busy + swept.busy,
        )


class FlowCollector:
    """Collects flows in a thread.

    The thread calls `pods_bypass` whenever the set of bypassing pods changes. The argument is the ifindexes
    of all devices whose pods were found to send to frontends past all programs of this backend.
    `note_netfilter`: see `NetfilterFlows`.

    Raises NotFound if the maps are not in `maps`.
    """

    def __init__(
        self,
        maps: Path,
        timeouts: FlowTimeouts,
        pods_bypass: Callable[[frozenset[int]], object],
        note_netfilter: Callable[[bool], object],
    ) -> None:
        self._maps = [Map.pinned(maps / name) for name in _MAPS]
        flows, replies, self._established, self._bypassing, endpoints, connections, peers = self._maps
        self._room = flows.shape.max_entries
        self._endpoints = endpoints.mapped()
        self._connections = Connections(connections, peers, self._endpoints)
        flow_maps = FlowMaps(flows, replies, self._established, self._endpoints)
        self._sweep = FlowSweep(flow_maps, timeouts, connections=self._connections)
        self.netfilter_flows = NetfilterFlows(maps, note_netfilter)
        self._pods_bypass = pods_bypass
        self._reported: frozenset[int] = frozenset()
        self._polled = 0.0
        self._collected = Collected()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flow-collector", daemon=True)
        self._thread.start()

    def collected(self) -> Collected:
        """The results so far. For any thread."""
        return self._collected

    def close(self) -> None:
        """End the thread, if necessary during a walk. It waits at most 5 s."""
        self._stop.set()
        if not threads.join(self._thread, _PATIENCE):
            return  # it reads the maps: they stay open until the process ends
        self._endpoints.close()
        self.netfilter_flows.close()
        for opened in self._maps:
            opened.close()

    def _run(self) -> None:
        interval, crowded = _SHORTEST, False
        ended = time.monotonic()
        while not self._stop.wait(_POLL):
            self._poll()
            was_crowded, crowded = crowded, self._is_crowded()
            longest = (_SHORTEST if was_crowded else _CROWDED_SHORTEST) if crowded else interval
            if time.monotonic() - ended >= min(interval, longest):
                interval = self._walk(interval, crowded)
                ended = time.monotonic()

    def _poll(self) -> None:
        """Report pods that bypass, if the set has changed."""
        self._polled = time.monotonic()
        try:
            seen = frozenset(_IFINDEX.unpack(key)[0] for key, _ in self._bypassing.items())
            if seen != self._reported:
                self._pods_bypass(seen)
                self._reported = seen
        except Exception as failure:  # the thread continues: without it there would be no later attempt
            log.error(PODS_UNREAD, reason=_reason(failure))

    def _is_crowded(self) -> bool:
        """Whether TCP flows, or all others, use so many entries that their room may soon be used up."""
        most = _CROWDED * self._room
        try:
            return any(_SIGNED.unpack(number)[0] > most for _, number in self._established.items())
        except KernelError as failure:
            log.error(COLLECT_FAILED, reason=_reason(failure))
            return False

    def _walk(self, interval: float, crowded: bool) -> float:
        """Walk over all flows. Returns the seconds until the next walk."""
        try:
            swept = self._sweep.run(self._rest, crowded=crowded)
        except Exception as failure:  # as above
            log.error(COLLECT_FAILED, reason=_reason(failure))
            return _SHORTEST
        self._collected = self._collected.plus(swept)
        self._forget()
        log.debug(COLLECTED, **swept._asdict())
        return following(swept, self._room, 0 if self._connections.is_active else interval, crowded)

    def _forget(self) -> None:
        """Remove connections of netfilter that have ended."""
        try:
            self.netfilter_flows.forget(self._rest)
        except Exception as failure:  # as above
            log.error(PORTS_UNREAD, reason=_reason(failure))

    def _rest(self, worked: float) -> bool:
        """Pause between two batches. Returns whether the agent ends."""
        if time.monotonic() - self._polled >= _POLL:
            self._poll()
        return self._stop.wait(min(_REST_FACTOR * worked, _LONGEST_REST))


def following(swept: Swept, room: int, interval: float, crowded: bool) -> float:
    """Seconds from this walk to the next one. `interval`: the seconds before this walk. `room`: the capacity.

    It doubles, up to a minute, while little is removed and the map is not full. Otherwise it is 10 s, or 2 s
    if much was removed from a `crowded` map.
    """
    removed = swept.expired + swept.retired + swept.orphaned
    used = max(swept.entries + swept.half_open, swept.replies)
    if removed > _CHANGED * (used + removed):
        return _CROWDED_SHORTEST if crowded else _SHORTEST
    return _SHORTEST if used > _FULL * room else min(max(_SHORTEST, 2 * interval), _LONGEST)


def _reason(failure: Exception) -> str:
    return failure.message if isinstance(failure, KernelError) else repr(failure)
