"""Finds the ebpfproxy program at a device, independent of how it is attached."""

import contextlib

from ebpfproxy.backends.ebpf.hooks import CLASSIFIERS
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import tc, tcx
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.tc import Side


def program_id(ifindex: int, side: Side) -> int | None:
    """The first one with a tcx link, otherwise one with a filter; None if there is none."""
    for placed in _placed(ifindex, side):
        with contextlib.closing(Program.by_id(placed.program_id)) as program:
            if program.called in CLASSIFIERS:
                return placed.program_id
    return tc.program_id(ifindex, side)


def _placed(ifindex: int, side: Side) -> tuple[tcx.Placed, ...]:
    try:
        return tcx.programs(ifindex, side)
    except KernelError:
        return ()
