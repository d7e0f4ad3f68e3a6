"""Attaches a program to a device's XDP hook by a bpf_link (Linux 5.9, aa8d3a716b59).

A device has one XDP program, in native or in generic mode. A link is pinned, and ends with its pin or its
device. Nothing replaces a program of another owner: the kernel rejects a link for a device that has a program
(dev_xdp_attach() of net/core/dev.c). All functions use the network namespace of the calling thread.
"""

import contextlib
import enum
from pathlib import Path

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf.bpf import Link, Program
from ebpfproxy.linux.netlink import iproute
from ebpfproxy.linux.netlink.xdp import GENERIC, NATIVE


class Mode(enum.StrEnum):
    """NATIVE runs the program in the device's driver, before the kernel allocates a packet. GENERIC runs it
    in the kernel's receive path, for any driver."""

    NATIVE = NATIVE
    GENERIC = GENERIC


_FLAGS = {Mode.NATIVE: 1 << 2, Mode.GENERIC: 1 << 1}  # XDP_FLAGS_DRV_MODE, XDP_FLAGS_SKB_MODE


def attach(ifindex: int, program: Program, mode: Mode, pin: Path) -> None:
    """Attach `program` by a new link, and pin that. Raises KernelError, as `Link.create_xdp`."""
    pin.unlink(missing_ok=True)
    try:
        link = Link.create_xdp(program, ifindex, _FLAGS[mode])
    except KernelError as failure:
        what = f"cannot attach the XDP program to {iproute.device_name(ifindex)}"
        raise type(failure)(f"{what}: {failure.__cause__ or failure}", failure.hint) from failure.__cause__
    with contextlib.closing(link):
        link.pin(pin)


def replace(pin: Path, program: Program) -> None:
    """Replace the program of a pinned link between two frames. Raises KernelError."""
    with Link.pinned_if_any(pin) as link:
        if link and link.program_id != program.id:
            link.replace(program)


def detach(pin: Path) -> bool:
    """Detach the pinned link at once, and unpin it; return whether it was attached. Raises KernelError."""
    attached = False
    with Link.pinned_if_any(pin) as link:
        if link:
            attached = link.ifindex != 0
            link.detach()
    pin.unlink(missing_ok=True)
    return attached
