"""A backend with some devices, and helpers that program it, change its programs and reject once."""

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf.backend import EbpfBackend
from ebpfproxy.backends.ebpf.entries import Entry, Key
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.bpf import tc, tcx
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.model.address import parse_address
from ebpfproxy.plan.service_plan import DevicePlan, DeviceRole, NodePlan
from tests.kernel import attached

SCHED_CLS = 3
SIZES = MapSizes(8, 64, 64, 16, 16, flows=16, source_ranges=16)
OTHER_SIZES = dataclasses.replace(SIZES, flows=32)
EMPTY_PLAN = NodePlan()
CLSACT_ONLY = pytest.mark.parametrize("way", ["clsact"], indirect=True)
TCX_ONLY = pytest.mark.parametrize("way", ["tcx"], indirect=True)
U32 = "u32 match u32 0 0 flowid 1:1"  # a filter of another program


@contextlib.contextmanager
def running(
    settings: EbpfSettings,
    pods_bypass: Callable[[frozenset[int]], object] = lambda seen: None,
    clock: Callable[[], float] = time.monotonic,
    filters_changed: Callable[[], object] = lambda: None,
) -> Iterator[EbpfBackend]:
    backend = EbpfBackend(settings, Callbacks(pods_bypass=pods_bypass, changed=filters_changed), clock)
    backend.open()
    try:
        yield backend
    finally:
        backend.close()


def device(name: str, role: DeviceRole = DeviceRole.UPLINK, layer3: bool = False) -> DevicePlan:
    return DevicePlan(socket.if_nametoindex(name), name, role, layer3, parse_address("192.0.2.10"), None)


def plan(*names: str) -> NodePlan:
    return NodePlan(devices=tuple(device(name) for name in names))


def bring(backend: EbpfBackend, node: NodePlan) -> Mapping[Key, KernelError]:
    """Read, compare and apply, as a verification does. Returns what was rejected."""
    return backend.apply(diff(backend.read(), backend.render((), node)))


def in_step(backend: EbpfBackend, node: NodePlan) -> bool:
    desired: dict[Key, Entry] = backend.render((), node)
    return backend.read() == desired


def programs(name: str) -> tuple[int | None, int | None]:
    ifindex = socket.if_nametoindex(name)
    return attached.program_id(ifindex, Side.INGRESS), attached.program_id(ifindex, Side.EGRESS)


def attaching() -> ModuleType:
    """The module whose function `attach` is in use; its first argument is the device's index."""
    return tcx if tcx.is_supported() else tc


def put(bpffs: Path, name: str, side: Side, program: Program) -> None:
    """Attach another program in the name of ebpfproxy, by the current way of attaching."""
    ifindex = socket.if_nametoindex(name)
    if tcx.is_supported():
        tcx.attach(ifindex, side, program, _pin(bpffs, ifindex, side))
    else:
        tc.attach(ifindex, side, program)


def take_off(bpffs: Path, name: str, side: Side) -> None:
    """Detach the program, as another program on the host might."""
    ifindex = socket.if_nametoindex(name)
    if tcx.is_supported():
        tcx.detach(_pin(bpffs, ifindex, side))
    else:
        tc.detach(ifindex, side)


def _pin(bpffs: Path, ifindex: int, side: Side) -> Path:
    return bpffs / "devices" / f"{ifindex}_{side.name.lower()}"


def pinned(bpffs: Path, *names: str) -> tuple[int, ...]:
    """The ids of the current programs."""
    folder = bpffs / "current"
    ids = []
    for name in names:
        with contextlib.closing(Program.pinned(folder / name)) as program:
            ids.append(program.id)
    return tuple(ids)


def reject(*_: object, **__: object) -> None:
    raise Rejected("rejected once")
