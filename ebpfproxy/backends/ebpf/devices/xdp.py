"""The XDP program at uplinks and tunnels (--ebpf-xdp), and the map `xdp_devices`, by which it sends frames.

A device whose XDP hook is not available works with the classifiers alone: the XDP program only forwards what
they would forward, too. So nothing here is an error for the backend.
"""

import contextlib
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.attachments import program_name
from ebpfproxy.backends.ebpf.entries import LOOPBACK, DeviceEntry
from ebpfproxy.errors import KernelError, ProgramRejected, Rejected
from ebpfproxy.linux.bpf import xdp
from ebpfproxy.linux.bpf.bpf import Link, Map, Program
from ebpfproxy.linux.bpf.xdp import Mode
from ebpfproxy.linux.netlink import xdp as netlink_xdp
from ebpfproxy.linux.netlink.xdp import XdpDevice
from ebpfproxy.log import Logger

log = Logger(__name__)

ATTACHED = "Attached the XDP program"
"""Packets of established flows of this device are forwarded by XDP."""
DETACHED = "Detached the XDP program"
"""The device is no uplink any more, a VLAN device uses it, or --ebpf-xdp changed."""
UNAVAILABLE = "Device works without XDP"
"""The device has another XDP program, or its driver lacks XDP. The tc programs forward all packets."""
REJECTED = "Kernel rejects the XDP program"
"""All devices work without XDP until the next start. The tc programs forward all packets."""
UNREADABLE = "Cannot check the XDP programs"
"""The devices or their XDP features could not be read. Retried every few seconds."""

_U32 = struct.Struct("=I")
_VETH = "veth"
_DISPATCHER = "xdp_dispatcher"  # the name of libxdp's program that calls others


class XdpProgram(Protocol):
    """Provides the XDP program: see `Programs`."""

    def xdp(self) -> Program: ...


class XdpState(NamedTuple):
    """XDP at one device.

    - `mode`: that of the agent's program, "" if it is not attached.
    - `sends_back`, `sends`: abi.h's enum xdp_device_flag.
    - `problem`, `remedy`: why it is not attached, or sends nothing; "" for no problem.
    - `lasting`: the problem is a property of the device, and no other program causes it.
    """

    device: XdpDevice
    mode: str = ""
    sends_back: bool = False
    sends: bool = False
    problem: str = ""
    remedy: str = ""
    lasting: bool = False


def is_wanted(ifindex: int, flags: int) -> bool:
    """Whether a device with these flags (abi.h's device_flag) gets the program."""
    unwanted = abi.DEVICE_POD | abi.DEVICE_GUEST | abi.DEVICE_LAYER3 | abi.DEVICE_TUNNEL
    return ifindex != LOOPBACK and not flags & unwanted


def states(
    wanted: Iterable[int], folder: Path, mode: Mode, devices: Mapping[int, XdpDevice] | None = None
) -> dict[int, XdpState]:
    """The state of each of these devices that exists, by ifindex. `folder`: where links are pinned.

    Raises KernelError.
    """
    present = netlink_xdp.devices() if devices is None else devices
    features = netlink_xdp.features() if mode is Mode.NATIVE else {}
    return {
        ifindex: _state(present[ifindex], folder / str(ifindex), mode, features.get(ifindex))
        for ifindex in sorted(wanted)
        if ifindex in present
    }


def _state(device: XdpDevice, pin: Path, mode: Mode, features: int | None) -> XdpState:
    """`features`: those of native mode, None if unknown."""
    running = _running(device, pin)
    sends = mode is Mode.GENERIC or bool((features or 0) & netlink_xdp.SENDS)
    if not running:
        return XdpState(device, "", False, sends, *_obstacle(device, mode, features))
    # With XDP_TX, veth_xdp_flush() wakes the peer only if that has an XDP program, too. ndo_xdp_xmit always
    # does, and is also possible for the device itself.
    sends_back = mode is Mode.GENERIC or device.kind != _VETH
    if sends_back or sends:
        return XdpState(device, running, sends_back, sends)
    return XdpState(
        device,
        running,
        problem="the other end of the veth pair does not accept frames of XDP programs",
        remedy="run `ethtool -K DEVICE gro on` at the other end, or set --ebpf-xdp=generic",
        lasting=True,
    )


def _running(device: XdpDevice, pin: Path) -> str:
    """The mode of the program that the pinned link has attached to the device. "" if there is none."""
    with Link.pinned_if_any(pin) as link:
        if link is None or link.ifindex != device.ifindex:
            return ""
        number = link.program_id
    return next((mode for mode, each in device.programs.items() if each == number), "")


def running(ifindexes: Iterable[int], folder: Path) -> dict[int, str]:
    """The mode of the agent's program at those of these devices that have it, by ifindex.

    Raises KernelError.
    """
    if not pins(folder):
        return {}
    present = netlink_xdp.devices()
    found = {each: _running(present[each], folder / str(each)) for each in ifindexes if each in present}
    return {ifindex: mode for ifindex, mode in found.items() if mode}


def _obstacle(device: XdpDevice, mode: Mode, features: int | None) -> tuple[str, str, bool]:
    """What prevents the program from being attached: problem, remedy and whether it is lasting, as in
    `XdpState`. Empty if nothing is known."""
    others = [program_name(number, "XDP program") for number in device.programs.values()]
    if others:
        by_libxdp = " of libxdp" if any(each.startswith(_DISPATCHER) for each in others) else ""
        return (
            f"it has another XDP program{by_libxdp}: {', '.join(others)}",
            f"detach it (`ip link set dev {device.name} xdp off`, or its owner), or set --ebpf-xdp=off",
            False,
        )
    if device.has_vlans:
        return (
            "VLAN devices use it, and the driver may hide VLAN tags from XDP programs",
            "set --ebpf-xdp=off" if mode is Mode.GENERIC else "set --ebpf-xdp=generic for the VLAN devices",
            True,
        )
    if mode is Mode.NATIVE and features is not None and not features & netlink_xdp.RUNS:
        return "its driver has no native XDP", "set --ebpf-xdp=generic", True
    return "", "", False


class XdpDevices:
    """Attaches the program to devices, and detaches it. For one thread."""

    def __init__(
        self,
        of: Map,
        programs: XdpProgram,
        folder: Path,
        mode: Mode | None,
        reported: dict[int, XdpState],
    ) -> None:
        """`of`: the map `xdp_devices`. `folder`: for pins of links. `mode`: None for no program.

        `reported`: the state of each device that was logged last, which `sync` changes.
        """
        self._map = of
        self._programs = programs
        self._folder = folder
        self._mode = mode
        self._reported = reported
        self._failed = ""

    def sync(self, devices: Iterable[tuple[int, DeviceEntry]]) -> None:
        """Attach the program to those of these devices that want it, and detach it from all others.

        Call it after a change of the devices or programs, and every few seconds: other programs may change
        the devices. Failures are logged once, and retried by the next call. A program that the kernel rejects
        is not loaded again, since that takes the verifier as long each time; a program of a previous version
        is detached.
        """
        wanted = (
            {ifindex for ifindex, entry in devices if is_wanted(ifindex, entry.flags)}
            if self._mode
            else set()
        )
        try:
            self._sync(wanted)
            self._failed = ""
        except ProgramRejected as failure:
            log.warning(REJECTED, reason=failure.message, hint=failure.hint)
            self._mode = None
            self.sync(())
        except KernelError as failure:
            if failure.message != self._failed:
                log.warning(UNREADABLE, reason=failure.message, hint=failure.hint)
            self._failed = failure.message

    def _sync(self, wanted: set[int]) -> None:
        mode = self._mode
        present = netlink_xdp.devices() if wanted or self._has_pins() else {}
        self._detach_others(
            {each for each in wanted & present.keys() if not present[each].has_vlans}, present
        )
        if mode is None or not wanted:
            self._write({})
            return
        program = self._programs.xdp()
        failures = self._attach(states(wanted, self._folder, mode, present), program, mode)
        found = states(wanted, self._folder, mode)
        for ifindex, failure in failures.items():
            if ifindex in found and not found[ifindex].mode:
                found[ifindex] = found[ifindex]._replace(problem=failure.message, remedy=failure.hint)
        self._write({ifindex: _entry(state) for ifindex, state in found.items()})
        self._report(found)

    def _has_pins(self) -> bool:
        return any(pins(self._folder))

    def _detach_others(self, wanted: set[int], present: Mapping[int, XdpDevice]) -> None:
        for pin, ifindex in pins(self._folder):
            if ifindex not in wanted and xdp.detach(pin) and ifindex in present:
                log.info(DETACHED, device=present[ifindex].name)
            if ifindex not in wanted:
                self._reported.pop(ifindex, None)

    def _attach(self, found: Mapping[int, XdpState], program: Program, mode: Mode) -> dict[int, KernelError]:
        """Attach the program in this mode; return the failures by ifindex."""
        failures: dict[int, KernelError] = {}
        for ifindex, state in found.items():
            pin = self._folder / str(ifindex)
            try:
                if state.mode == mode:
                    xdp.replace(pin, program)
                    continue
                if state.mode:
                    xdp.detach(pin)
                elif state.problem:
                    continue
                self._folder.mkdir(exist_ok=True)
                xdp.attach(ifindex, program, mode, pin)
            except KernelError as failure:
                failures[ifindex] = failure
            except OSError as failure:
                failures[ifindex] = Rejected(f"cannot pin the XDP link: {failure.strerror}")
        return failures

    def _write(self, entries: Mapping[int, bytes]) -> None:
        present = {_U32.unpack(key)[0]: value for key, value in self._map.items()}
        for ifindex, value in entries.items():
            if present.get(ifindex) != value:
                self._map.update(_U32.pack(ifindex), value)
        for ifindex in present.keys() - entries.keys():
            self._map.delete(_U32.pack(ifindex))

    def _report(self, found: Mapping[int, XdpState]) -> None:
        """Log each change of a device's state once."""
        for ifindex, state in found.items():
            known = self._reported.get(ifindex)
            self._reported[ifindex] = state
            if known and (known.mode, known.problem) == (state.mode, state.problem):
                continue
            name = state.device.name
            if state.problem:
                log.warning(UNAVAILABLE, device=name, reason=state.problem, hint=state.remedy)
            elif state.mode:
                log.info(ATTACHED, device=name, mode=state.mode)


def _entry(state: XdpState) -> bytes:
    flags = abi.XDP_SENDS_BACK * state.sends_back | abi.XDP_SENDS * state.sends
    return abi.XDP_DEVICE.pack(state.device.address[:6].ljust(6, b"\0"), flags)


def pins(folder: Path) -> list[tuple[Path, int]]:
    """The pinned links and the ifindexes of their devices. Empty if the folder does not exist."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path, int(path.name)) for path in found if path.name.isdecimal())


def detach_all(folder: Path, dry_run: bool = False) -> list[str]:
    """Detach the agent's XDP programs from all devices. Returns what was detached, or with `dry_run` would
    be, one line each."""
    names = {ifindex: device.name for ifindex, device in netlink_xdp.devices().items()}
    detached = []
    for pin, ifindex in pins(folder):
        if not dry_run:
            with contextlib.suppress(KernelError):
                xdp.detach(pin)
            pin.unlink(missing_ok=True)
        detached.append(f"XDP link of {names.get(ifindex, '(gone)')}")
    return detached
