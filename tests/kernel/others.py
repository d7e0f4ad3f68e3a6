"""Foreign programs and the ways to attach them to a device.

All functions act in the network namespace of the calling thread.
"""

import contextlib
import struct
from collections.abc import Callable, Iterator

from ebpfproxy.linux.bpf import bpf, tc, tcx
from ebpfproxy.linux.bpf.bpf import Link, Program
from ebpfproxy.linux.bpf.tc import Side

NEXT, PASS, SHOT = -1, 0, 2
"""Verdicts: TCX_NEXT and TC_ACT_UNSPEC, TCX_PASS and TC_ACT_OK, TCX_DROP and TC_ACT_SHOT."""
HEAD, TAIL = 1 << 3, 1 << 4
"""Ends of a device's list of tcx links: BPF_F_BEFORE and BPF_F_AFTER without another program."""

_FIELDS = {"mark": 8, "tc_index": 44, "cb": 48}
"""Offsets in struct __sk_buff (include/uapi/linux/bpf.h); for `cb`, of its first word."""
_ATTACH_TYPES = {Side.INGRESS: 46, Side.EGRESS: 47}  # BPF_TCX_INGRESS, BPF_TCX_EGRESS
_SCHED_CLS = 3
_XDP, _XDP_ATTACH_TYPE, _SKB_MODE = 6, 37, 1 << 1  # BPF_PROG_TYPE_XDP, BPF_XDP, XDP_FLAGS_SKB_MODE
_XDP_PASS = 2
_EVERYTHING = 3  # ETH_P_ALL


@contextlib.contextmanager
def program(action: int = NEXT, **writes: int) -> Iterator[Program]:
    """A classifier that writes the given fields of the packet (mark, tc_index, cb) and returns `action`."""
    code = b"".join(
        _instruction(0xB7, 2, value) + _instruction(0x63, 2 << 4 | 1, 0, _FIELDS[field])
        for field, value in writes.items()
    )
    code += _instruction(0xB7, 0, action) + _instruction(0x95, 0, 0)
    with contextlib.closing(Program.load(_SCHED_CLS, 0, code)) as loaded:
        yield loaded


def _instruction(code: int, registers: int, immediate: int, offset: int = 0) -> bytes:
    return struct.pack("=BBh", code, registers, offset) + (immediate & 0xFFFFFFFF).to_bytes(4, "little")


def xdp_program(name: str) -> Program:
    """An XDP program of this name that passes every frame. The caller closes it."""
    code = _instruction(0xB7, 0, _XDP_PASS) + _instruction(0x95, 0, 0)
    return Program.load(_XDP, _XDP_ATTACH_TYPE, code, name)


@contextlib.contextmanager
def xdp_linked(ifindex: int, name: str) -> Iterator[int]:
    """Within the block, an XDP program of this name is attached in generic mode. Yield its id."""
    with (
        contextlib.closing(xdp_program(name)) as foreign,
        contextlib.closing(Link.create_xdp(foreign, ifindex, _SKB_MODE)) as link,
    ):
        try:
            yield foreign.id
        finally:
            link.detach()


@contextlib.contextmanager
def linked(ifindex: int, side: Side, foreign: Program, where: int = HEAD) -> Iterator[None]:
    """Within the block, the program is attached by a tcx link at one end of the list."""
    attr = struct.pack("=IIIIIIQ", foreign.fd, ifindex, _ATTACH_TYPES[side], where, 0, 0, 0)
    fd, _ = bpf.bpf(bpf.LINK_CREATE, attr, "cannot attach")
    with contextlib.closing(Link(fd, "foreign")) as link:
        try:
            yield
        finally:
            link.detach()  # immediately: after close(), the kernel may detach later


def add_filter(
    ifindex: int,
    side: Side,
    foreign: Program,
    *,
    handle: int = 1,
    name: str = "foreign",
    priority: int = tc.FIRST,
) -> None:
    """Attach a bpf filter with direct action. With priority 0, the kernel chooses priority and handle."""
    from pyroute2.iproute import IPRoute

    with IPRoute() as changes:
        if not tc.has_clsact(ifindex):
            changes.tc("add", "clsact", ifindex)
        where = {"parent": int(side), "protocol": _EVERYTHING}
        if priority:
            where |= {"prio": priority, "handle": handle}
        changes.tc("add-filter", "bpf", ifindex, fd=foreign.fd, name=name, direct_action=True, **where)


def remove_filters(ifindex: int, side: Side, name: str = "") -> None:
    """Remove all bpf filters with that name; "": all bpf filters."""
    from pyroute2.iproute import IPRoute

    with IPRoute() as changes:
        for one in tc.filters(ifindex, side):
            if one.name == name or not name:
                where = {"parent": int(side), "prio": one.priority, "protocol": one.protocol}
                changes.tc("del-filter", "bpf", ifindex, handle=one.handle, **where)


@contextlib.contextmanager
def filtered(ifindex: int, side: Side, foreign: Program, where: int = HEAD) -> Iterator[None]:
    """Within the block, the program is attached by a filter: with priority 1 before all others, or 9."""
    name = f"foreign_{foreign.id}"
    add_filter(ifindex, side, foreign, handle=9, name=name, priority=1 if where == HEAD else 9)
    try:
        yield
    finally:
        remove_filters(ifindex, side, name)


Way = Callable[[int, Side, Program, int], contextlib.AbstractContextManager[None]]
"""`linked` or `filtered`."""


def order(ifindex: int, side: Side) -> list[int]:
    """The ids of all programs at the device in running order: tcx links, then filters."""
    links = tcx.programs(ifindex, side) if tcx.is_supported() else ()
    return [each.program_id for each in links] + [each.program_id for each in tc.filters(ifindex, side)]
