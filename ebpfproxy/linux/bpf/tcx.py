"""Attaches programs to a device's ingress and egress by tcx links (Linux 6.6).

Each side of a device has one ordered list of programs, which run before all tc filters of that side. A
program that returns TCX_NEXT (-1) passes the packet to the next program in the list, and after the last one
to the filters. TCX_PASS (0) ends both.

A link of the agent is pinned. It ends with its pin or with its device. The kernel cannot move a link within
the list, and one program cannot be in a list twice. `attach` documents how a link is moved to the head
without an unprocessed packet in between.

All functions use the network namespace of the calling thread.

Sources: e420bed02507 ("bpf: Add fd-based tcx multi-prog infra with link support", 6.6); kernel/bpf/tcx.c,
kernel/bpf/mprog.c; include/uapi/linux/bpf.h.
"""

import contextlib
import ctypes
import errno
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected
from ebpfproxy.linux.bpf.bpf import PROG_QUERY, Link, Map, Program, bpf, errno_of
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netlink import iproute

_ATTACH_TYPE = {Side.INGRESS: 46, Side.EGRESS: 47}  # BPF_TCX_INGRESS, BPF_TCX_EGRESS
_MAX_PROGRAMS = 64  # BPF_MPROG_MAX: in one list
_LOOPBACK = 1
_SCHED_CLS = 3  # BPF_PROG_TYPE_SCHED_CLS
_PROG_ARRAY = 3  # BPF_MAP_TYPE_PROG_ARRAY


class Placed(NamedTuple):
    """A program in a list. `link_id` is 0 if it was attached without a link."""

    program_id: int
    link_id: int


def is_supported() -> bool:
    """Whether this kernel has tcx, found by listing the programs of loopback. Raises Rejected."""
    try:
        _query(_LOOPBACK, Side.INGRESS)
    except Rejected as failure:
        if errno_of(failure) == errno.EINVAL:  # the kernel does not know the attach type or the fields
            return False
        if errno_of(failure) != errno.ENODEV:
            raise
    return True


def programs(ifindex: int, side: Side) -> tuple[Placed, ...]:
    """All programs of this side, in the order in which they run. Empty if the device is gone. Raises
    Rejected."""
    try:
        return _query(ifindex, side)
    except Rejected as failure:
        if errno_of(failure) == errno.ENODEV:
            return ()
        raise


def attach(ifindex: int, side: Side, program: Program, pin: Path) -> None:
    """Make `program` the first one of this side, by the link that is pinned at `pin`, or by a new link.

    If the link is at the head of the list, its program is replaced in one step. If another program is at the
    head, a new link is created at the head, whose program calls `program`. Then the old link is detached, and
    the new one gets `program` itself. Each packet passes `program` throughout. Between two of the steps a
    packet passes it twice.

    Raises NotFound if the device is gone, or another KernelError.
    """
    _finish(pin, ifindex, side)
    with Link.pinned_if_any(pin) as link:
        placed = programs(ifindex, side) if link else ()
        position = _position(link, placed)
        if link and position is not None:
            if placed[position].program_id != program.id:
                link.replace(program)
            if position:
                _advance(ifindex, side, program, pin, link)
            return
    _remove(pin)
    with contextlib.closing(_create(program, ifindex, side)) as created:
        created.pin(pin)


def _advance(ifindex: int, side: Side, program: Program, pin: Path, previous: Link) -> None:
    """Replace the link `previous` by one at the head of the list.

    If the process is killed after the detachment, the program of the new link no longer calls another one,
    because the kernel empties an array of programs that no process has open. `_finish` repairs that.
    """
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(_caller(program))
        link = _create(caller, ifindex, side)
        stack.callback(link.close)
        link.pin(_new_pin(pin))
        previous.detach()
        link.replace(program)
        _new_pin(pin).rename(pin)


@contextlib.contextmanager
def _caller(program: Program) -> Iterator[Program]:
    """A program that calls `program` within the block. If the call fails, it returns TCX_NEXT."""
    with contextlib.closing(Map.create(_PROG_ARRAY, 4, 4, 1)) as array:
        array.update(bytes(4), struct.pack("=I", program.fd))
        code = b"".join(
            struct.pack("=BBhi", *instruction)
            for instruction in (
                (0x18, 1 << 4 | 2, 0, array.fd),  # r2 = the array (BPF_PSEUDO_MAP_FD)
                (0, 0, 0, 0),
                (0xB7, 3, 0, 0),  # r3 = 0, the index
                (0x85, 0, 0, 12),  # bpf_tail_call(ctx, array, index)
                (0xB7, 0, 0, -1),  # r0 = TCX_NEXT
                (0x95, 0, 0, 0),
            )
        )
        with contextlib.closing(Program.load(_SCHED_CLS, 0, code)) as caller:
            yield caller


def _finish(pin: Path, ifindex: int, side: Side) -> None:
    """Complete the steps of a process that was killed in `_advance`."""
    new_pin = _new_pin(pin)
    with Link.pinned_if_any(new_pin) as new_link:
        if new_link is None:
            return
        with Link.pinned_if_any(pin) as link:
            if _position(link, programs(ifindex, side)) is None:
                new_pin.rename(pin)
                return
    _remove(new_pin)


def detach(pin: Path) -> bool:
    """Detach the pinned link at once, and unpin it; return whether it was attached. Raises KernelError."""
    attached = False
    for path in (_new_pin(pin), pin):
        attached = _remove(path) or attached
    return attached


def _remove(path: Path) -> bool:
    """Detach, then unpin; return whether it was attached.

    Without the detachment, the kernel detaches a link some time after its last pin is removed.
    """
    attached = False
    with Link.pinned_if_any(path) as link:
        if link:
            attached = link.ifindex != 0
            link.detach()
    path.unlink(missing_ok=True)
    return attached


def link_id(pin: Path) -> int | None:
    """The id of the pinned link. None if it does not exist."""
    with Link.pinned_if_any(pin) as link:
        return link.id if link else None


def _position(link: Link | None, placed: tuple[Placed, ...]) -> int | None:
    """The link's index in the list. None if its device is gone or in another network namespace."""
    ids = [each.link_id for each in placed]
    return ids.index(link.id) if link and link.id in ids else None


def _new_pin(pin: Path) -> Path:
    """The pin of a new link until it replaces `pin`."""
    return pin.with_name(f"{pin.name}_new")


def _create(program: Program, ifindex: int, side: Side) -> Link:
    action = f"cannot attach to {side.name.lower()} of {iproute.device_name(ifindex)}"
    try:
        return Link.create_first(program, ifindex, _ATTACH_TYPE[side])
    except AlreadyExists as failure:
        hint = "check whether another program removed or moved the pin of the link that has this program"
        raise AlreadyExists(f"{action}: {failure.message}", hint) from failure
    except KernelError as failure:
        kind = NotFound if errno_of(failure) == errno.ENODEV else Rejected
        raise kind(f"{action}: {failure.message}", failure.hint) from failure.__cause__


def _query(ifindex: int, side: Side) -> tuple[Placed, ...]:
    ids, links = (ctypes.c_uint32 * _MAX_PROGRAMS)(), (ctypes.c_uint32 * _MAX_PROGRAMS)()
    target = (ifindex, _ATTACH_TYPE[side], 0, 0)
    attr = struct.pack(
        "=IIIIQIIQQQQ", *target, ctypes.addressof(ids), _MAX_PROGRAMS, 0, 0, ctypes.addressof(links), 0, 0
    )
    _, result = bpf(PROG_QUERY, attr, f"cannot list the tcx programs of {iproute.device_name(ifindex)}")
    count = struct.unpack_from("=I", result, 24)[0]
    return tuple(map(Placed, ids[:count], links[:count]))
