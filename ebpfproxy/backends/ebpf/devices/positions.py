"""Records whether the classifiers run first at their devices, and when to move them to the first position."""

import time
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.backends.ebpf.attachments import Running
from ebpfproxy.log import Logger
from ebpfproxy.model.device import DeviceSide

log = Logger(__name__)

PROGRAMS_BEFORE = "Programs of others run before ebpfproxy"
"""A program or filter was placed before a classifier. Packets that it does not pass on are not translated."""
FIRST_AGAIN = "No program runs before ebpfproxy any more"
"""The classifier is the first program at this side of the device again."""

_SHORTEST, _LONGEST = 4.0, 300.0  # seconds between two attempts at one place
_HELD = 60.0  # seconds at the first position after which it is no longer contested


class _Place(NamedTuple):
    """The state of a place. `tried`: the number of attempts that did not last. `due`: the time of the next
    possible attempt. `since`: the time of the last one."""

    side: DeviceSide
    tried: int = 0
    due: float = 0.0
    since: float = 0.0


class Positions:
    """The positions of the classifiers. For one thread, except `troubles`. A place is (ifindex, side).

    After the first loss of the first position, the program is moved back at once. After further losses it
    waits 4 s, 8 s and so on, up to 5 minutes, so that two agents do not replace programs all the time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[tuple[int, str], _Place] = {}
        self._troubles: tuple[DeviceSide, ...] = ()

    def troubles(self) -> tuple[DeviceSide, ...]:
        """The places where other programs run first. For any thread."""
        return self._troubles

    def is_due(self, ifindex: int, side: str, device: str, running: Running) -> bool:
        """Record the program at a place; return whether to move it to the first position now."""
        key, now = (ifindex, side), self._clock()
        known = self._places.get(key, _Place(DeviceSide(device, side)))
        lasted = now - known.since >= _HELD
        if not running.before and lasted:
            known = known._replace(tried=0, due=0.0)
        contested = running.can_advance and bool(running.before) and known.tried > 0
        present = DeviceSide(device, side, running.before, contested)
        self._report(known.side, present)
        self._keep(key, known._replace(side=present))
        return running.can_advance and now >= known.due

    def tried(self, ifindex: int, side: str) -> None:
        """Record an attempt to move the program to the first position. Call it before the attempt."""
        key, now = (ifindex, side), self._clock()
        known = self._places.get(key)
        if known:
            wait = min(_SHORTEST * 2**known.tried, _LONGEST)
            self._keep(key, known._replace(tried=known.tried + 1, due=now + wait, since=now))

    def forget(self, ifindex: int) -> None:
        """Remove the places of a device. Call it when the agent has no program at the device any more."""
        self._places = {key: place for key, place in self._places.items() if key[0] != ifindex}
        self._publish()

    def _keep(self, key: tuple[int, str], place: _Place) -> None:
        previous = self._places.get(key)
        if place.side.before or place.tried:
            self._places[key] = place
        else:
            self._places.pop(key, None)
        if previous is None or previous.side != place.side or key not in self._places:
            self._publish()

    def _publish(self) -> None:
        found = (place.side for place in self._places.values() if place.side.before)
        self._troubles = tuple(sorted(found))

    @staticmethod
    def _report(previous: DeviceSide, present: DeviceSide) -> None:
        if previous.before == present.before and previous.contested == present.contested:
            return
        if not present.before:
            log.info(FIRST_AGAIN, device=present.device, side=present.side)
            return
        log.warning(
            PROGRAMS_BEFORE,
            device=present.device,
            side=present.side,
            position=present.position,
            before=", ".join(present.before),
            contested=present.contested,
        )
