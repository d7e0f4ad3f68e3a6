"""Checks that packets reach the classifiers. An attachment alone does not prove it (cilium #48420).

Each classifier counts its packets in the map `device_packets` before it does anything else. If a device
counts packets and the classifier counts none, the packets do not reach it. The two counts are never equal,
because the device counts before GRO and after segmentation, and the program in between.
"""

import struct
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpfproxy import threads
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import EGRESS, INGRESS
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import links
from ebpfproxy.log import Logger
from ebpfproxy.model.device import DeviceSide

log = Logger(__name__)

UNREACHED = "Packets do not reach an attached program"
"""Packets pass the device, but the classifier at this side counts none. Services do not work for them."""
REACHED = "Packets reach the attached program again"
"""The classifier at this side counts packets again."""
UNREADABLE = "Cannot check that packets reach the programs"
"""The device counters or the map `device_packets` could not be read."""

INTERVAL = 5.0
"""Seconds between two checks."""

LEAST = 100
"""With fewer packets of a device in an interval, the check has no result."""

CONFIRMED = 2
"""The number of consecutive intervals after which the check reports a place."""

_PATIENCE = 5.0  # seconds that `close` waits for a check
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


class Hook(NamedTuple):
    """One side of one device, by ifindex. `side` is "ingress" or "egress"."""

    ifindex: int
    side: str
    device: str


class Count(NamedTuple):
    """Packets so far, as the device and as the classifier counted them."""

    device: int
    program: int


class Judge:
    """Derives from counts the places that packets do not reach. No I/O."""

    def __init__(self) -> None:
        self._previous: Mapping[Hook, Count] = {}
        self._suspect: dict[Hook, int] = {}  # consecutive intervals

    def unreached(self, counts: Mapping[Hook, Count]) -> frozenset[Hook]:
        """The places that packets do not reach.

        `counts`: of all places that have a classifier now. A place that the last call did not contain is
        evaluated from the next call on.
        """
        suspect: dict[Hook, int] = {}
        for place, count in counts.items():
            previous = self._previous.get(place, count)
            if count.program != previous.program:
                continue
            passed = count.device - previous.device >= LEAST
            known = self._suspect.get(place, 0)
            if passed or known:  # too few packets keep the previous result
                suspect[place] = known + passed
        self._previous, self._suspect = dict(counts), suspect
        return frozenset(place for place, times in suspect.items() if times >= CONFIRMED)


class PacketCheck:
    """Checks in a thread, in the network namespace of the thread that creates this object.

    The thread calls `attached`, which returns ifindex, side and device name of each place with a classifier.
    Raises NotFound if the map is not in `maps`.
    """

    def __init__(
        self,
        maps: Path,
        attached: Callable[[], Collection[tuple[int, str, str]]],
        interval: float = INTERVAL,
    ) -> None:
        self._packets = Map.pinned(maps / "device_packets")
        self._attached = attached
        self._interval = interval
        self._judge = Judge()
        self._unreached: frozenset[Hook] = frozenset()
        self._failed = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="packet-check", daemon=True)
        self._thread.start()

    def troubles(self) -> tuple[DeviceSide, ...]:
        """The places that packets do not reach. For any thread."""
        return tuple(
            DeviceSide(place.device, place.side, unreached=True) for place in sorted(self._unreached)
        )

    def close(self) -> None:
        self._stop.set()
        if threads.join(self._thread, _PATIENCE):
            self._packets.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                found = self._judge.unreached(self._counts())
            except Exception as failure:  # the thread continues: the next check may succeed
                self._log_failure(failure.message if isinstance(failure, KernelError) else repr(failure))
                continue
            self._failed = ""
            for place in sorted(found - self._unreached):
                log.error(UNREACHED, device=place.device, side=place.side)
            for place in sorted(self._unreached - found):
                log.info(REACHED, device=place.device, side=place.side)
            self._unreached = found

    def _log_failure(self, reason: str) -> None:
        """Log a reason once, until it changes."""
        if reason != self._failed:
            log.warning(UNREADABLE, reason=reason)
        self._failed = reason

    def _counts(self) -> dict[Hook, Count]:
        """The counts of all places. Devices are read first, so packets between the reads count for the
        program."""
        attached = [Hook(*each) for each in self._attached()]
        devices = links.packets() if attached else {}
        return {
            place: Count(devices[place.ifindex][place.side == EGRESS], self._count(place))
            for place in attached
            if place.ifindex in devices
        }

    def _count(self, place: Hook) -> int:
        value = self._packets.lookup(_U32.pack(slot(place.ifindex, place.side))) or b""
        return sum(row[0] for row in _U64.iter_unpack(value))


def slot(ifindex: int, side: str) -> int:
    """The index in `device_packets`, as in device_count() of bpf/maps.h.

    Devices may share an index. Then packets of one device hide that those of the other do not arrive.
    """
    return ifindex % abi.DEVICE_SLOTS * 2 + (INGRESS, EGRESS).index(side)
