"""Attaches the classifiers to devices: by tcx links if the kernel has them, else by tc filters.

Both ways have the same methods. A place is one side (ingress or egress) of one device, identified by ifindex.
"""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from ebpfproxy.backends.ebpf.entries import EGRESS, INGRESS
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import tc, tcx
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.bpf.tcx import Placed

SIDES = {INGRESS: Side.INGRESS, EGRESS: Side.EGRESS}
_NAMES = {side: name for name, side in SIDES.items()}


class Running(NamedTuple):
    """The agent's program at one place.

    `proper`: it is attached in the way that this agent uses. Where tcx is used, a filter of a previous run
    is not. `before`: the programs that run before it, in this order. `can_advance`: `attach` would move it
    before these.
    """

    program_id: int
    proper: bool
    before: tuple[str, ...]
    can_advance: bool


class Attachments(Protocol):
    """A way to attach programs. `makes_clsact`: whether `attach` may create a clsact; it then returns True.

    - `running` returns the agent's program at a place, None if there is none.
    - `attach` attaches the program at the first position that is available. It replaces another program of
      the agent in one step, so no packet passes without one. Raises NotFound if the device is gone, or
      another KernelError.
    - `detach` returns whether anything was attached.
    - `forget_gone` removes the remains of devices that no longer exist. `present`: the existing devices.
    """

    makes_clsact: bool

    def running(self, ifindex: int, side: Side) -> Running | None: ...

    def attach(self, ifindex: int, side: Side, program: Program) -> bool: ...

    def detach(self, ifindex: int, side: Side) -> bool: ...

    def forget_gone(self, present: Collection[int]) -> None: ...


class TcFilters:
    """Filters of the clsact qdisc. `owned`: the ids of programs whose filters are the agent's. None: all
    filters with ebpfproxy's name are."""

    makes_clsact = True

    def __init__(self, owned: Collection[int] | None = None) -> None:
        self._owned = owned

    def running(self, ifindex: int, side: Side) -> Running | None:
        found = tc.filters(ifindex, side)
        own = next((each for each in found if each.is_own), None)
        if own is None or not (self._owned is None or own.program_id in self._owned):
            return None
        before = tuple(dict.fromkeys(map(str, tc.before(found))))  # u32 shows as two filters
        return Running(own.program_id, True, before, tc.can_advance(found))

    def attach(self, ifindex: int, side: Side, program: Program) -> bool:
        return tc.attach(ifindex, side, program)

    def detach(self, ifindex: int, side: Side) -> bool:
        return self.running(ifindex, side) is not None and tc.detach(ifindex, side)

    def forget_gone(self, present: Collection[int]) -> None:
        """Does nothing: the kernel has removed the filters with the devices."""


class TcxLinks:
    """tcx links, pinned in `folder` as IFINDEX_SIDE. A filter of a previous run without tcx is removed once
    the link is attached. `owned` is as in TcFilters."""

    makes_clsact = False

    def __init__(self, folder: Path, owned: Collection[int] | None = None) -> None:
        self._folder = folder
        self._filters = TcFilters(owned)
        self._links: dict[Path, int] = {}  # the id of the link that was last seen at a pin
        self._without_filter: set[tuple[int, Side]] = set()

    def running(self, ifindex: int, side: Side) -> Running | None:
        placed = tcx.programs(ifindex, side)
        position = self._position(self._pin(ifindex, side), placed)
        previous = self._previous(ifindex, side)
        if position is None:
            return previous and previous._replace(proper=False)
        before = tuple(_name(each) for each in placed[:position])
        return Running(placed[position].program_id, previous is None, before, can_advance=position > 0)

    def _position(self, pin: Path, placed: tuple[Placed, ...]) -> int | None:
        ids = [each.link_id for each in placed]
        if ids and self._links.get(pin) not in ids:
            self._links[pin] = tcx.link_id(pin) or 0
        known = self._links.get(pin)
        return ids.index(known) if known and known in ids else None

    def _previous(self, ifindex: int, side: Side) -> Running | None:
        """A filter of a previous run. A result of None is cached: an agent with tcx creates no filters."""
        if (ifindex, side) in self._without_filter:
            return None
        found = self._filters.running(ifindex, side)
        if found is None:
            self._without_filter.add((ifindex, side))
        return found

    def attach(self, ifindex: int, side: Side, program: Program) -> bool:
        self._folder.mkdir(exist_ok=True)
        tcx.attach(ifindex, side, program, self._pin(ifindex, side))
        self._filters.detach(ifindex, side)
        return False

    def detach(self, ifindex: int, side: Side) -> bool:
        detached = tcx.detach(self._pin(ifindex, side))
        return self._filters.detach(ifindex, side) or detached

    def forget_gone(self, present: Collection[int]) -> None:
        self._without_filter = {each for each in self._without_filter if each[0] in present}
        for pin, ifindex, _ in pinned(self._folder):
            if ifindex not in present:
                self._links.pop(pin, None)
                tcx.detach(pin)

    def _pin(self, ifindex: int, side: Side) -> Path:
        return self._folder / f"{ifindex}_{_NAMES[side]}"


class Pin(NamedTuple):
    path: Path
    ifindex: int
    side: str


def pinned(folder: Path) -> list[Pin]:
    """The pinned links of `TcxLinks`, by device and side. Empty if the folder does not exist."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        ifindex, _, side = path.name.removesuffix("_new").partition("_")
        if ifindex.isdecimal() and side in SIDES:
            found.append(Pin(path.with_name(f"{ifindex}_{side}"), int(ifindex), side))
    return sorted(set(found), key=lambda pin: (pin.ifindex, list(SIDES).index(pin.side)))


def choose(folder: Path, owned: Collection[int] | None = None) -> Attachments:
    """The best way that this kernel supports. `folder` is for pins. Raises Rejected if support cannot be
    determined."""
    return TcxLinks(folder, owned) if tcx.is_supported() else TcFilters(owned)


def _name(placed: Placed) -> str:
    return program_name(placed.program_id, "tcx program")


def program_name(program_id: int, kind: str = "program") -> str:
    """The name of any program of this machine, for readers. `kind`: how it is attached."""
    try:
        program = Program.by_id(program_id)
    except KernelError:  # it was unloaded meanwhile, or CAP_SYS_ADMIN is missing
        return f"{kind} {program_id}"
    try:
        return f"{program.called or 'unnamed'} ({kind} {program_id})"
    finally:
        program.close()
