"""A thread that watches the packet path's maps: it removes flows that are over, and reports pods that no
program of this dataplane sees.
"""

import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ebpf.flows.netfilter_flows import NetfilterFlows
from ebpfproxy.backends.ebpf.flows.state import FlowTimeouts
from ebpfproxy.backends.ebpf.flows.sweep import FlowMaps, FlowSweep, Swept
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.log import Logger

log = Logger(__name__)

COLLECTED = "Collected flows"
"""Flows that are over were removed."""
STILL_COLLECTING = "Ending while flows are collected"
"""The agent does not wait any longer for the collector."""
PODS_UNREAD = "Cannot search pods that bypass the socket hooks"
"""Retried at the collector's next turn; forwarding does not depend on it."""
COLLECT_FAILED = "Cannot collect flows"
"""Retried at the collector's next turn; forwarding does not depend on it."""
PORTS_UNREAD = "Cannot look up the connections that netfilter masquerades"
"""Their ports stay reserved until the next turn."""

_POLL = 1.0  # seconds between looks at `bypassing`, and so until a pod that bypasses is served
_SHORTEST, _LONGEST = 10.0, 60.0  # seconds between walks
_CHANGED = 0.05  # the part of all entries that is removed where a walk was worth it
_CROWDED = 0.75  # the part of the room that is taken from which on memory is wanted soon
_SHARE = 3  # it rests so much longer than it works: a quarter of a CPU while it walks
_LONGEST_REST = 0.05  # seconds
_PATIENCE = 5.0  # seconds that an agent's end waits for a step that cannot be interrupted
_IFINDEX = struct.Struct("=I")


class Collected(NamedTuple):
    """`entries` and `half_open` are the established and the half-open flows that the last walk left; the
    other numbers are sums since the start. See `Swept`.
    """

    entries: int = 0
    half_open: int = 0
    expired: int = 0
    retired: int = 0
    orphaned: int = 0
    busy: int = 0

    def events(self) -> dict[str, int]:
        """As further counters beside those of the programs."""
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
    """A thread of its own. `pods_bypass` is called in it, with the indexes of all devices whose pods were
    seen to reach frontends by no program of ours, whenever there are others than before. `note_netfilter`:
    see `NetfilterFlows`.

    Raises NotFound where the maps are not in `maps`.
    """

    def __init__(
        self,
        maps: Path,
        timeouts: FlowTimeouts,
        pods_bypass: Callable[[frozenset[int]], object],
        note_netfilter: Callable[[bool], object],
    ) -> None:
        names = "flows", "replies", "established_flows", "bypassing", "endpoints"
        self._maps = [Map.pinned(maps / name) for name in names]
        self._flows, replies, established, self._bypassing, endpoints = self._maps
        self._endpoints = endpoints.mapped()
        self._sweep = FlowSweep(FlowMaps(self._flows, replies, established, self._endpoints), timeouts)
        self.netfilter_flows = NetfilterFlows(maps, note_netfilter)
        self._pods_bypass = pods_bypass
        self._told: frozenset[int] = frozenset()
        self._polled = 0.0
        self._collected = Collected()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flow-collector", daemon=True)
        self._thread.start()

    def collected(self) -> Collected:
        """For any thread."""
        return self._collected

    def close(self) -> None:
        """End, in the middle of a walk if need be. Where that takes longer than 5 s, it is not waited for."""
        self._stop.set()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():  # it reads the maps: they stay open until the process ends
            log.warning(STILL_COLLECTING, seconds=_PATIENCE)
            return
        self._endpoints.close()
        self.netfilter_flows.close()
        for opened in self._maps:
            opened.close()

    def _run(self) -> None:
        interval = _SHORTEST
        due = time.monotonic() + interval
        while not self._stop.wait(_POLL):
            self._poll()
            if time.monotonic() >= due:
                interval = self._walk(interval)
                due = time.monotonic() + interval

    def _poll(self) -> None:
        """Tell of pods that bypass, where there are others than before."""
        self._polled = time.monotonic()
        try:
            seen = frozenset(_IFINDEX.unpack(key)[0] for key, _ in self._bypassing.items())
            if seen != self._told:
                self._pods_bypass(seen)
                self._told = seen
        except Exception as failure:  # the thread continues: only it looks again
            log.error(PODS_UNREAD, reason=_reason(failure))

    def _walk(self, interval: float) -> float:
        """Walk over all flows; returns the seconds until the next time."""
        try:
            swept = self._sweep.run(self._rest)
        except Exception as failure:  # as above
            log.error(COLLECT_FAILED, reason=_reason(failure))
            return _SHORTEST
        self._collected = self._collected.plus(swept)
        self._forget()
        log.debug(COLLECTED, **swept._asdict())
        return following(swept, self._flows.shape.max_entries, interval)

    def _forget(self) -> None:
        """Netfilter's connections that have ended, too."""
        try:
            self.netfilter_flows.forget(self._rest)
        except Exception as failure:  # as above
            log.error(PORTS_UNREAD, reason=_reason(failure))

    def _rest(self, worked: float) -> bool:
        """Between two batches. Whether the agent ends."""
        if time.monotonic() - self._polled >= _POLL:
            self._poll()
        return self._stop.wait(min(_SHARE * worked, _LONGEST_REST))


def following(swept: Swept, room: int, interval: float) -> float:
    """How many seconds after this walk the next one begins, if `interval` passed before it.

    Twice as many as long as there is little to remove, up to a minute.
    """
    removed = swept.expired + swept.retired + swept.orphaned
    used = max(swept.entries + swept.half_open, swept.replies)
    if removed > _CHANGED * (used + removed) or used > _CROWDED * room:
        return _SHORTEST
    return min(2 * interval, _LONGEST)


def _reason(failure: Exception) -> str:
    return failure.message if isinstance(failure, KernelError) else repr(failure)
