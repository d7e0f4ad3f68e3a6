"""Attaching the XDP program to devices, among programs of others. The program here passes every frame."""

import contextlib
import errno
import logging
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.devices import xdp as xdp_devices
from ebpfproxy.backends.ebpf.devices.xdp import XdpDevices, XdpState
from ebpfproxy.backends.ebpf.entries import DeviceEntry
from ebpfproxy.errors import ProgramRejected
from ebpfproxy.linux.bpf.bpf import Link, Map, Program
from ebpfproxy.linux.bpf.xdp import Mode
from ebpfproxy.linux.netlink import xdp as netlink_xdp
from ebpfproxy.model.address import Family, unspecified
from tests.kernel.others import xdp_linked, xdp_program
from tests.kernel.veth_pair import veth_pair
from tests.support.bpf_place import HASH, NO_PREALLOC, bpf_place, create_map
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel

_U32 = struct.Struct("=I")
modes = pytest.mark.parametrize("mode", list(Mode))


class _Provided(NamedTuple):
    program: Program

    def xdp(self) -> Program:
        return self.program


class _Rejected:
    """A program that the kernel does not load."""

    def __init__(self) -> None:
        self.attempts = 0

    def xdp(self) -> Program:
        self.attempts += 1
        raise ProgramRejected("cannot load BPF program xdp_forward", "", "xdp_forward", errno.EINVAL, ())


class Place:
    """A namespace with the veth devices n0 and n1, and what `XdpDevices` needs."""

    def __init__(self, node: Namespace, folder: Path, of: Map, own: Program) -> None:
        self.node, self.folder, self.map, self.own = node, folder, of, own
        self.reported: dict[int, XdpState] = {}
        self.n0, self.n1 = map(socket.if_nametoindex, ("n0", "n1"))

    def sync(
        self, mode: Mode | None, *ifindexes: int, flags: int = 0, program: Program | None = None
    ) -> None:
        entry = DeviceEntry(flags, unspecified(Family.IPV4), unspecified(Family.IPV6), ())
        provided = _Provided(program or self.own)
        devices = XdpDevices(self.map, provided, self.folder, mode, self.reported)
        devices.sync((each, entry) for each in ifindexes or (self.n0,))

    def programs(self, ifindex: int) -> dict[str, int]:
        return netlink_xdp.devices()[ifindex].programs

    def entries(self) -> dict[int, tuple[bytes, int]]:
        """Address and flags by ifindex."""
        found = ((_U32.unpack(key)[0], abi.XDP_DEVICE.unpack(value)) for key, value in self.map.items())
        return {ifindex: (bytes(address), flags) for ifindex, (address, flags) in found}


@pytest.fixture
def place() -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(veth_pair("xdp-devices"))
        made = stack.enter_context(bpf_place())
        of = create_map(HASH, 4, abi.XDP_DEVICE.size, 64, NO_PREALLOC)
        stack.callback(of.close)
        own = xdp_program("xdp_forward")
        stack.callback(own.close)
        yield Place(node, made.bpffs / "xdp", of, own)


@modes
def test_an_uplink_gets_the_program_and_an_entry(place: Place, mode: Mode) -> None:
    place.sync(mode)
    assert place.programs(place.n0) == {mode.value: place.own.id}
    assert place.programs(place.n1) == {}
    (address, flags) = place.entries()[place.n0]
    assert address == netlink_xdp.devices()[place.n0].address
    if mode is Mode.GENERIC:
        assert flags == abi.XDP_SENDS | abi.XDP_SENDS_BACK


@pytest.mark.parametrize("flags", [abi.DEVICE_POD, abi.DEVICE_GUEST, abi.DEVICE_LAYER3, abi.DEVICE_TUNNEL])
def test_pods_and_devices_without_ethernet_get_no_program(place: Place, flags: int) -> None:
    place.sync(Mode.GENERIC, flags=flags)
    assert place.programs(place.n0) == {}
    assert place.entries() == {}


def test_a_veth_device_sends_frames_only_while_its_peer_accepts_them(place: Place) -> None:
    place.sync(Mode.NATIVE)
    assert place.entries()[place.n0][1] == 0
    assert "does not accept" in place.reported[place.n0].problem
    place.sync(Mode.NATIVE, place.n0, place.n1)
    place.sync(Mode.NATIVE, place.n0, place.n1)
    assert place.entries()[place.n0][1] == place.entries()[place.n1][1] == abi.XDP_SENDS
    place.sync(Mode.NATIVE, place.n0)
    place.sync(Mode.NATIVE, place.n0)
    assert place.entries()[place.n0][1] == 0


@modes
def test_the_program_of_another_owner_stays_and_is_reported_once(
    place: Place, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with xdp_linked(place.n0, "others_program") as other:
        for _ in range(3):
            place.sync(mode)
        assert place.programs(place.n0) == {"generic": other}
        assert "others_program" in place.reported[place.n0].problem
        reports = [each for each in caplog.records if xdp_devices.UNAVAILABLE in each.getMessage()]
        assert len(reports) == 1
        assert place.entries()[place.n0][1] & abi.XDP_SENDS_BACK == 0
    place.sync(mode)
    assert place.programs(place.n0) == {mode.value: place.own.id}


def test_a_dispatcher_of_libxdp_is_named(place: Place) -> None:
    with xdp_linked(place.n0, "xdp_dispatcher"):
        place.sync(Mode.NATIVE)
        assert "of libxdp" in place.reported[place.n0].problem


@modes
def test_another_mode_replaces_the_link(place: Place, mode: Mode) -> None:
    other = next(each for each in Mode if each is not mode)
    place.sync(other)
    place.sync(mode)
    assert place.programs(place.n0) == {mode.value: place.own.id}


@modes
def test_another_version_of_the_program_replaces_it_in_the_link(place: Place, mode: Mode) -> None:
    place.sync(mode)
    with contextlib.closing(Link.pinned(place.folder / str(place.n0))) as before:
        number = before.id
    with contextlib.closing(xdp_program("xdp_forward")) as newer:
        place.sync(mode, program=newer)
        assert place.programs(place.n0) == {mode.value: newer.id}
    with contextlib.closing(Link.pinned(place.folder / str(place.n0))) as after:
        assert after.id == number


@modes
def test_a_link_that_another_process_detached_is_restored(place: Place, mode: Mode) -> None:
    place.sync(mode)
    with contextlib.closing(Link.pinned(place.folder / str(place.n0))) as link:
        link.detach()
    assert place.programs(place.n0) == {}
    place.sync(mode)
    assert place.programs(place.n0) == {mode.value: place.own.id}


def test_switching_the_option_off_removes_programs_pins_and_entries(place: Place) -> None:
    place.sync(Mode.NATIVE, place.n0, place.n1)
    place.sync(None, place.n0, place.n1)
    assert (place.programs(place.n0), place.programs(place.n1)) == ({}, {})
    assert place.entries() == {}
    assert list(place.folder.iterdir()) == []


def test_the_pin_of_a_device_that_is_gone_is_removed(place: Place) -> None:
    place.sync(Mode.NATIVE)
    place.node.ip("link del n0")
    place.sync(Mode.NATIVE)
    assert list(place.folder.iterdir()) == []
    assert place.entries() == {}


@modes
def test_a_device_that_gets_vlans_loses_the_program(
    place: Place, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers may remove the tag before an XDP program sees the frame. In generic mode the program does not
    see it either, and the frame that it redirects keeps it. Kernels of tests may lack VLAN devices."""
    place.sync(mode)
    assert place.programs(place.n0) == {mode.value: place.own.id}
    if place.node.lacks("link add link n0 name n0.5 type vlan id 5"):
        read = netlink_xdp.devices
        monkeypatch.setattr(
            netlink_xdp, "devices", lambda: {i: each._replace(has_vlans=True) for i, each in read().items()}
        )
    for _ in range(2):
        place.sync(mode)
        assert place.programs(place.n0) == {}
        assert "VLAN" in place.reported[place.n0].problem
    assert list(place.folder.iterdir()) == []


def test_a_rejected_program_is_loaded_once_and_replaces_that_of_a_previous_version(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.sync(Mode.GENERIC)
    rejected = _Rejected()
    devices = XdpDevices(place.map, rejected, place.folder, Mode.GENERIC, place.reported)
    entry = DeviceEntry(0, unspecified(Family.IPV4), unspecified(Family.IPV6), ())
    for _ in range(3):
        devices.sync([(place.n0, entry)])
        assert place.programs(place.n0) == {}
        assert place.entries() == {}
    assert rejected.attempts == 1
    assert len([each for each in caplog.records if xdp_devices.REJECTED in each.getMessage()]) == 1


def test_a_driver_without_native_mode_is_reported(place: Place) -> None:
    place.node.ip("link add br0 type bridge", "link set br0 up")
    bridge = socket.if_nametoindex("br0")
    place.sync(Mode.NATIVE, bridge)
    assert place.reported[bridge].problem == "its driver has no native XDP"
    place.sync(Mode.GENERIC, bridge)
    assert place.programs(bridge) == {"generic": place.own.id}


def test_detach_all_removes_every_link_but_nothing_in_a_dry_run(place: Place) -> None:
    place.sync(Mode.NATIVE, place.n0, place.n1)
    expected = ["XDP link of n0", "XDP link of n1"]
    assert sorted(xdp_devices.detach_all(place.folder, dry_run=True)) == expected
    assert place.programs(place.n0)
    assert sorted(xdp_devices.detach_all(place.folder)) == expected
    assert (place.programs(place.n0), place.programs(place.n1)) == ({}, {})
    assert xdp_devices.detach_all(place.folder) == []


def test_ip_link_shows_the_program(place: Place) -> None:
    """Operators find it by its name."""
    place.sync(Mode.NATIVE)
    shown = subprocess.run(["ip", "-d", "link", "show", "n0"], capture_output=True, text=True, check=True)
    assert f"prog/xdp id {place.own.id} name xdp_forward" in shown.stdout
