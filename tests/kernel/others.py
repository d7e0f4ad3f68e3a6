"""Programs of others, and the ways in which they are attached to a device.

Everything acts in the network namespace of the calling thread.
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
"""Of a device's list of tcx links: BPF_F_BEFORE and BPF_F_AFTER without another program."""

_FIELDS = {"mark": 8, "tc_index": 44, "cb": 48}
"""Offsets in struct __sk_buff (include/uapi/linux/bpf.h). Of `cb` it is the first word."""
_ATTACH_TYPES = {Side.INGRESS: 46, Side.EGRESS: 47}  # BPF_TCX_INGRESS, BPF_TCX_EGRESS
_SCHED_CLS = 3
_EVERYTHING = 3  # ETH_P_ALL


@contextlib.contextmanager
def program(action: int = NEXT, **writes: int) -> Iterator[Program]:
    """A classifier that returns `action` for every packet. Before that it writes the fields of the packet
    that are named: mark, tc_index, cb."""
    code = b"".join(
        _instruction(0xB7, 2, value) + _instruction(0x63, 2 << 4 | 1, 0, _FIELDS[field])
        for field, value in writes.items()
    )
    code += _instruction(0xB7, 0, action) + _instruction(0x95, 0, 0)
    with contextlib.closing(Program.load(_SCHED_CLS, 0, code)) as loaded:
        yield loaded


def _instruction(code: int, registers: int, immediate: int, offset: int = 0) -> bytes:
    return struct.pack("=BBh", code, registers, offset) + (immediate & 0xFFFFFFFF).to_bytes(4, "little")


@contextlib.contextmanager
def linked(ifindex: int, side: Side, theirs: Program, where: int = HEAD) -> Iterator[None]:
    """Attached by a tcx link at one end of the list, within the block."""
    attr = struct.pack("=IIIIIIQ", theirs.fd, ifindex, _ATTACH_TYPES[side], where, 0, 0, 0)
    fd, _ = bpf.bpf(bpf.LINK_CREATE, attr, "cannot attach")
    with contextlib.closing(Link(fd, "theirs")) as link:
        try:
            yield
        finally:
            link.detach()  # at once: the kernel may put off what close() begins


def add_filter(
    ifindex: int,
    side: Side,
    theirs: Program,
    *,
    handle: int = 1,
    name: str = "theirs",
    priority: int = tc.FIRST,
) -> None:
    """Attach it by a bpf filter with direct action. With priority 0 the kernel chooses one, and a handle."""
    from pyroute2 import IPRoute

    with IPRoute() as changes:
        if not tc.has_clsact(ifindex):
            changes.tc("add", "clsact", ifindex)
        where = {"parent": int(side), "protocol": _EVERYTHING}
        if priority:
            where |= {"prio": priority, "handle": handle}
        changes.tc("add-filter", "bpf", ifindex, fd=theirs.fd, name=name, direct_action=True, **where)


def remove_filters(ifindex: int, side: Side, name: str = "") -> None:
    """All bpf filters of that name; "": all of any."""
    from pyroute2 import IPRoute

    with IPRoute() as changes:
        for one in tc.filters(ifindex, side):
            if one.name == name or not name:
                where = {"parent": int(side), "prio": one.priority, "protocol": one.protocol}
                changes.tc("del-filter", "bpf", ifindex, handle=one.handle, **where)


@contextlib.contextmanager
def filtered(ifindex: int, side: Side, theirs: Program, where: int = HEAD) -> Iterator[None]:
    """Attached by a filter within the block: at priority 1 before all others there, or at priority 9."""
    name = f"theirs_{theirs.id}"
    add_filter(ifindex, side, theirs, handle=9, name=name, priority=1 if where == HEAD else 9)
    try:
        yield
    finally:
        remove_filters(ifindex, side, name)


Way = Callable[[int, Side, Program, int], contextlib.AbstractContextManager[None]]
"""`linked` or `filtered`."""


def order(ifindex: int, side: Side) -> list[int]:
    """The ids of all programs there, in the order in which they run: tcx links, then filters."""
    links = tcx.programs(ifindex, side) if tcx.is_supported() else ()
    return [each.program_id for each in links] + [each.program_id for each in tc.filters(ifindex, side)]
