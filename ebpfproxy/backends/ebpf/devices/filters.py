"""The devices that the classifiers are attached to: their entries in the map `devices`, and the attachments.

The programs read the map. It also records which clsacts the agent created. It does not record attachments:
those are read from the devices.
"""

import contextlib
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.attachments import SIDES, Attachments, Running, TcFilters, pinned
from ebpfproxy.backends.ebpf.devices import arp
from ebpfproxy.backends.ebpf.devices.positions import Positions
from ebpfproxy.backends.ebpf.entries import (
    BEHIND,
    EGRESS,
    INGRESS,
    LOOPBACK,
    OUTDATED,
    DeviceEntry,
    DeviceKey,
)
from ebpfproxy.errors import KernelError, NotFound, TableFull
from ebpfproxy.linux.bpf import tc, tcx
from ebpfproxy.linux.bpf.bpf import Map, Program
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netlink import iproute, links
from ebpfproxy.model.address import Address, Family, unspecified

GONE = "(gone)"
"""The name of a device that is in the map but does not exist on this node."""

_U32 = struct.Struct("=I")
_U64_SIZE = 8
_UNKNOWN = DeviceEntry(-1, unspecified(Family.IPV4), unspecified(Family.IPV6), ())
"""The entry of a device that has a program of the agent but is not in the map. No desired entry equals it."""

Rejections = dict[DeviceKey, KernelError]


class Classifiers(Protocol):
    """The programs by the names of `hooks.CLASSIFIERS`: see `Programs`."""

    def classifier(self, name: str) -> Program: ...

    def classifier_ids(self) -> dict[str, int]: ...


class DeviceTable:
    """The devices of mode ebpf. Puts and drops are separate steps, since other changes are made between
    them."""

    def __init__(
        self,
        devices: Map,
        classifiers: Classifiers,
        made: Collection[int] = frozenset(),
        attachments: Attachments | None = None,
        positions: Positions | None = None,
    ) -> None:
        """`classifiers`: the programs to attach.

        `made`: ifindexes of devices whose clsact is the agent's, in addition to those that the map records.
        `attachments`: how programs are attached, by default as tc filters.
        """
        self._map = devices
        self._made = made
        self._attachments = attachments or TcFilters()
        self._positions = positions or Positions()
        self._attached: frozenset[tuple[int, str, str]] = frozenset()
        self._in_use: frozenset[int] = frozenset()  # the devices in `_attached`, by ifindex
        self._classifiers = classifiers
        self._names: dict[int, str] = {}  # by ifindex: the name at the last put or read
        self._last: dict[int, tuple[str, tuple[str, ...]]] = {}  # by ifindex: name and sides when it existed

    def read(self) -> dict[DeviceKey, DeviceEntry]:
        """Every device that is in the map, or has a program of the agent.

        `sides` contains each side with a program of the agent. It is the plain name of the side if the
        program is the one that the flags in the map require. " outdated" is appended for another program,
        which will be replaced or removed. " behind" is appended if the program must be moved to the first
        position.

        A device that no longer exists is returned as it was last put or read: its removal is no change by
        another program, and is reported by the kernel. If only a previous run knew it, its name is GONE and
        it has no sides. A renamed device has its present name.
        """
        present = links.names()
        self._attachments.forget_gone(present.keys())
        found = self._found(present, present.keys())
        self._names = {key.ifindex: key.name for key in found}
        return found

    def observe(self) -> dict[DeviceKey, DeviceEntry]:
        """Like `read`, but pins of devices that no longer exist stay."""
        present = links.names()
        return self._found(present, present.keys())

    @property
    def uses_filters(self) -> bool:
        """Whether programs are attached as tc filters. The kernel sends notifications for these."""
        return self._attachments.makes_clsact

    def attached(self) -> frozenset[tuple[int, str, str]]:
        """Ifindex, side and device name of each place where the last `read` or `look` found the required
        program. For any thread."""
        return self._attached

    def is_in_use(self, ifindex: int) -> bool:
        """Whether the last `read` or `look` found the required program at a side of the device. For any
        thread."""
        return ifindex in self._in_use

    def look(self) -> dict[DeviceKey, DeviceEntry]:
        """Like `read`, but only for devices in the map. Only a previous run can leave programs at others.

        It does not change the names that `drop` compares.
        """
        return self._found(links.names(), ())

    def _found(self, present: Mapping[int, str], further: Collection[int]) -> dict[DeviceKey, DeviceEntry]:
        """The devices in the map, and those of `further` that have a program.

        `present`: the names of all existing devices, by ifindex.
        """
        written = dict(self.written())
        found: dict[DeviceKey, DeviceEntry] = {}
        for ifindex in sorted(written.keys() | further):
            entry = written.get(ifindex, _UNKNOWN)
            name, sides = self._name_and_sides(ifindex, present.get(ifindex), entry.flags)
            if sides or ifindex in written:
                found[DeviceKey(ifindex, name)] = entry._replace(sides=sides)
                self._last[ifindex] = name, sides
        self._attached = frozenset(
            (key.ifindex, side.removesuffix(f" {BEHIND}"), key.name)
            for key, entry in found.items()
            for side in entry.sides
            if not side.endswith(OUTDATED)
        )
        self._in_use = frozenset(ifindex for ifindex, _, _ in self._attached)
        return found

    def _name_and_sides(self, ifindex: int, name: str | None, flags: int) -> tuple[str, tuple[str, ...]]:
        """Those at the last read if the device does not exist: `name` is None, or it is gone since then."""
        if name is not None:
            sides = tuple(self._sides(ifindex, name, flags))
            if len(sides) == len(SIDES) or iproute.exists(ifindex):
                return name, sides
        return self._last.get(ifindex, (GONE, ()))

    def written(self) -> Iterator[tuple[int, DeviceEntry]]:
        """The entries of the map by ifindex, without sides."""
        for key, value in self._map.items():
            v4, v6, flags, bridge = abi.DEVICE.unpack(value)
            known = flags & ~abi.DEVICE_CLSACT
            yield _U32.unpack(key)[0], DeviceEntry(known, Address(v4), Address(v6), (), bridge)

    def _sides(self, ifindex: int, device: str, flags: int) -> Iterator[str]:
        for side, place in SIDES.items():
            running = self._attachments.running(ifindex, place)
            if running is None:
                continue
            if not self._is_right(running, flags, side):
                yield f"{side} {OUTDATED}"
            elif self._positions.is_due(ifindex, side, device, running):
                yield f"{side} {BEHIND}"
            else:
                yield side

    def _is_right(self, running: Running, flags: int, side: str) -> bool:
        wanted = self._classifiers.classifier_ids().get(classifier(flags, side))
        return running.proper and running.program_id == wanted

    def fill(self, puts: Mapping[DeviceKey, DeviceEntry]) -> Rejections:
        """Write the map; return the failures by key. Attachments do not change."""
        rejected: Rejections = {}
        for key, entry in puts.items():
            self._names[key.ifindex] = key.name
            self._last[key.ifindex] = key.name, entry.sides
            try:
                made = abi.DEVICE_CLSACT if self._is_own(key.ifindex) else 0
                self._write(key.ifindex, entry, made)
            except TableFull:
                rejected[key] = self._full(key)
            except KernelError as failure:
                rejected[key] = failure
        return rejected

    def _full(self, key: DeviceKey) -> TableFull:
        room = self._map.shape.max_entries
        return TableFull(
            f"{key}: map devices is full: it has room for {room} devices",
            "select fewer devices with --tc-devices",
        )

    def attach(self, puts: Mapping[DeviceKey, DeviceEntry]) -> Rejections:
        """Attach, replace or detach programs at devices that `fill` has written. Return the failures by key.

        All egress sides come first, so that no packet is translated whose replies are not. A device that no
        longer exists is no error: its entry is deleted, and the next plan does not contain it.
        """
        rejected: Rejections = {}
        gone: set[DeviceKey] = set()
        for side in (EGRESS, INGRESS):
            for key, entry in puts.items():
                if key in rejected or key in gone:
                    continue
                try:
                    self._sync_side(key.ifindex, side, entry)
                except NotFound:
                    self._map.delete(_U32.pack(key.ifindex))
                    self._last.pop(key.ifindex, None)
                    self._positions.forget(key.ifindex)
                    gone.add(key)
                except KernelError as failure:
                    rejected[key] = failure
        return rejected

    def _sync_side(self, ifindex: int, side: str, entry: DeviceEntry) -> None:
        name, place = classifier(entry.flags, side), SIDES[side]
        if side not in entry.sides:
            self._attachments.detach(ifindex, place)
            return
        running = self._attachments.running(ifindex, place)
        if running and self._is_right(running, entry.flags, side):
            if not self._positions.is_due(ifindex, side, iproute.device_name(ifindex), running):
                return
            self._positions.tried(ifindex, side)
        self._attach(ifindex, place, entry, self._classifiers.classifier(name))
        if side == EGRESS and not entry.flags & (abi.DEVICE_POD | abi.DEVICE_GUEST):
            arp.announce_own_addresses(iproute.device_name(ifindex))

    def _attach(self, ifindex: int, place: Side, entry: DeviceEntry, program: Program) -> None:
        """Attach a program. A new clsact is recorded in the map before it is created, so a killed process
        leaves no unrecorded clsact."""
        if not self._attachments.makes_clsact:
            self._attachments.attach(ifindex, place, program)
            return
        own = self._is_own(ifindex)
        expected = not own and not tc.has_clsact(ifindex)
        if expected:
            self._write(ifindex, entry, abi.DEVICE_CLSACT)
        try:
            created = self._attachments.attach(ifindex, place, program)
        except KernelError:
            if expected:
                self._write(ifindex, entry, 0)
            raise
        if created != expected and not own:
            self._write(ifindex, entry, abi.DEVICE_CLSACT if created else 0)

    def drop(self, keys: Collection[DeviceKey]) -> Rejections:
        """Detach the programs, all ingress sides first. Return the failures by key.

        Then remove the clsact if the agent created it and it is empty, and then the map's entry.
        A key is skipped if its device was put or read under another name since.
        """
        rejected: Rejections = {}
        unchanged = [key for key in keys if self._names.get(key.ifindex, key.name) == key.name]
        for step in (self._detach_ingress, self._detach_egress, self._forget):
            for key in unchanged:
                if key not in rejected:
                    try:
                        step(key.ifindex)
                    except KernelError as failure:
                        rejected[key] = failure
        return rejected

    def _detach_ingress(self, ifindex: int) -> None:
        self._detach(ifindex, Side.INGRESS)

    def _detach_egress(self, ifindex: int) -> None:
        self._detach(ifindex, Side.EGRESS)

    def _detach(self, ifindex: int, place: Side) -> None:
        self._attachments.detach(ifindex, place)

    def _forget(self, ifindex: int) -> None:
        if self._is_own(ifindex):
            tc.remove_clsact(ifindex)
        self._map.delete(_U32.pack(ifindex))
        self._names.pop(ifindex, None)
        self._last.pop(ifindex, None)
        self._positions.forget(ifindex)

    def has_outdated(self, key: DeviceKey) -> bool:
        """Whether a program of the agent that is not one of `classifiers` is attached to this device."""
        ids = self._classifiers.classifier_ids().values()
        found = (self._attachments.running(key.ifindex, place) for place in Side)
        return any(each.program_id not in ids for each in found if each)

    def clsacts(self) -> frozenset[int]:
        """The ifindexes of devices whose clsact the agent created."""
        return clsacts(self._map)

    def _is_own(self, ifindex: int) -> bool:
        """Whether the agent created the device's clsact."""
        value = self._map.lookup(_U32.pack(ifindex))
        return ifindex in self._made or bool(value and abi.DEVICE.unpack(value)[2] & abi.DEVICE_CLSACT)

    def _write(self, ifindex: int, entry: DeviceEntry, more_flags: int) -> None:
        value = abi.DEVICE.pack(entry.v4, entry.v6, entry.flags | more_flags, entry.bridge)
        self._map.update(_U32.pack(ifindex), value)


def classifier(flags: int, side: str) -> str:
    """The name of the program for one side of a device with these flags (abi.h's device_flag)."""
    if flags & abi.DEVICE_TUNNEL and side == INGRESS:
        return "from_tunnel"
    name = "to_any" if side == EGRESS else "from_any"
    return f"{name}_l3" if flags & abi.DEVICE_LAYER3 else name


def clsacts(devices: Map) -> frozenset[int]:
    """The ifindexes of devices whose clsact the agent created, as this map `devices` records."""
    return _flagged(devices, abi.DEVICE_CLSACT)


def previous_clsacts(pins: Iterable[Path]) -> frozenset[int]:
    """Like `clsacts`, for pins of maps `devices`. Ignores a pin that is missing or has another shape."""
    return frozenset().union(*(_previous_flagged(pin, abi.DEVICE_CLSACT) for pin in pins))


def served_pods(pins: Iterable[Path]) -> frozenset[int]:
    """The ifindexes of pods' devices that these pins of maps `devices` record.

    Ignores a pin that is missing or has another shape.
    """
    return frozenset().union(*(_previous_flagged(pin, abi.DEVICE_POD) for pin in pins))


def served_loopback(pins: Iterable[Path]) -> frozenset[int]:
    """Like `served_pods`, for loopback."""
    return frozenset({LOOPBACK} if any(LOOPBACK in _recorded(pin, abi.DEVICE.size) for pin in pins) else ())


def bypassing_pods(pins: Iterable[Path]) -> frozenset[int]:
    """The ifindexes of devices whose pods were found to bypass the socket hooks.

    `pins` are of maps `bypassing`. Ignores a pin that is missing or has another shape.
    """
    return frozenset().union(*(_recorded(pin, _U64_SIZE) for pin in pins))


def _recorded(pin: Path, value_size: int) -> frozenset[int]:
    with _readable(pin, value_size) as devices:
        return frozenset(_U32.unpack(key)[0] for key, _ in devices.items()) if devices else frozenset()


def _previous_flagged(pin: Path, flag: int) -> frozenset[int]:
    with _readable(pin, abi.DEVICE.size) as devices:
        return _flagged(devices, flag) if devices else frozenset()


def _flagged(devices: Map, flag: int) -> frozenset[int]:
    entries = ((key, abi.DEVICE.unpack(value)[2]) for key, value in devices.items())
    return frozenset(_U32.unpack(key)[0] for key, flags in entries if flags & flag)


@contextlib.contextmanager
def _readable(path: Path, value_size: int) -> Iterator[Map | None]:
    """A pinned map of devices by ifindex. None if it is missing or has another shape."""
    try:
        opened = Map.pinned(path)
    except KernelError:
        yield None
        return
    with contextlib.closing(opened):
        same_shape = (opened.shape.key_size, opened.shape.value_size) == (_U32.size, value_size)
        yield opened if same_shape else None


def detach_all(folder: Path | None, dry_run: bool = False) -> list[str]:
    """Detach the agent's programs from every device of this network namespace: tc filters, and links that are
    pinned in `folder`. Returns what was detached, or with `dry_run` would be, one line each."""
    names = links.names()
    detached = [
        f"link at {pin.side} of {names.get(pin.ifindex, GONE)}"
        for pin in (pinned(folder) if folder else ())
        if (tcx.link_id(pin.path) is not None if dry_run else tcx.detach(pin.path))
    ]
    detached += [
        f"filter at {side} of {name}"
        for ifindex, name in names.items()
        for side, place in SIDES.items()
        if (tc.program_id(ifindex, place) is not None if dry_run else tc.detach(ifindex, place))
    ]
    return detached


def remove_clsacts(made: Collection[int], dry_run: bool = False) -> list[str]:
    """Remove each unused clsact from the devices of this network namespace with the ifindexes `made`.

    Returns what was removed, one line each. With `dry_run`, it returns what would be removed once the agent's
    filters are detached.
    """
    return [
        f"clsact of {name}"
        for ifindex, name in links.names().items()
        if ifindex in made and (_is_clsact_unused(ifindex) if dry_run else tc.remove_clsact(ifindex))
    ]


def _is_clsact_unused(ifindex: int) -> bool:
    """Whether the device has a clsact without filters of other programs."""
    others = (each for side in Side for each in tc.filters(ifindex, side) if not each.is_own)
    return tc.has_clsact(ifindex) and next(others, None) is None
