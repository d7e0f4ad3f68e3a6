"""The checks of /readyz?verbose: what the agent's readiness depends on, and what limits a ready agent."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ebpfproxy.model.device import DeviceSide


class Check(NamedTuple):
    """One check. `ok`: the agent can be ready. `detail`: one line, "" if there is nothing to say."""

    name: str
    ok: bool
    detail: str = ""

    def __str__(self) -> str:
        """The line of /readyz?verbose, in the form of the API server.

        >>> str(Check("synced", True)), str(Check("synced", False, "no sync has succeeded"))
        ('[+]synced ok', '[-]synced failed: no sync has succeeded')
        """
        state = "ok" if self.ok else "failed"
        return f"[{'+' if self.ok else '-'}]{self.name} {state}" + (f": {self.detail}" if self.detail else "")


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    unavailable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rejected: int = 0
    verified: float | None = None
    differences: int = 0


class Readiness:
    """What the control thread knows about the kernel. Any thread may read: the state is replaced as a whole.

    Times are seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._state = _State()

    @property
    def unavailable(self) -> Mapping[str, str]:
        """The modes that `auto` prefers to the current one, with the reasons why it did not select them."""
        return self._state.unavailable

    def fell_back(self, unavailable: Mapping[str, str]) -> None:
        """Set `unavailable`; empty if the current mode is the preferred one, or is configured."""
        self._state = dataclasses.replace(self._state, unavailable=dict(unavailable))

    def synced(self, rejected: int) -> None:
        """Record how many entries the kernel rejected in a successful sync."""
        self._state = dataclasses.replace(self._state, rejected=rejected)

    def verified(self, now: float, differences: int) -> None:
        """Record a complete comparison of the kernel with what was written, and what it found.

        The differences were repaired.
        """
        self._state = dataclasses.replace(self._state, verified=now, differences=differences)

    def checks(
        self, mode: str, has_synced: bool, healthy: bool, sides: Collection[DeviceSide], now: float
    ) -> list[Check]:
        """Return all checks. The agent is ready if all are ok.

        `mode`: the current mode, "" before one is selected. `healthy`: no change waits for long. `sides`: as
        in `Metrics`.
        """
        state = self._state
        return [
            Check("synced", has_synced, "" if has_synced else "no sync has succeeded since the start"),
            Check("changes", healthy, "" if healthy else "a change does not reach the kernel"),
            Check("services", True, _rejected(state.rejected)),
            Check("attachments", not any(each.is_bypassed for each in sides), _sides(sides)),
            Check("mode", True, _mode(mode, state.unavailable)),
            Check("verification", True, _verification(state, now)),
        ]


def _rejected(count: int) -> str:
    return f"degraded: the kernel rejects {count} entries" if count else ""


def _sides(sides: Collection[DeviceSide]) -> str:
    return "; ".join(f"{each.device} {each.side} {_trouble(each)}" for each in sides)


def _trouble(side: DeviceSide) -> str:
    if side.unreached:
        return "is not reached by packets"
    return f"runs after {', '.join(side.before)}" + (", which returns to the first place" * side.contested)


def _mode(mode: str, unavailable: Mapping[str, str]) -> str:
    reasons = "; ".join(f"{name} is unavailable: {reason}" for name, reason in unavailable.items())
    return f"{mode}, degraded: {reasons}" if reasons else mode


def _verification(state: _State, now: float) -> str:
    if state.verified is None:
        return "none yet"
    found = f"repaired {state.differences} differences" if state.differences else "no differences"
    return f"{now - state.verified:.0f} s ago, {found}"
