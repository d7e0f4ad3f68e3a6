"""Removing everything that the eBPF dataplane put into the kernel."""

import contextlib
import shutil
from pathlib import Path

from ebpfproxy.dataplanes.ebpf import devices, programs
from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.errors import AlreadyExists, Rejected
from ebpfproxy.kernel import inlet, mounts
from ebpfproxy.kernel.lock import FolderLock, NamespaceLock


def remove(bpffs_root: Path, cgroup_root: Path | None) -> list[str]:
    """Detach and unpin all that is ours; returns what was removed, in order, and is empty where nothing was.

    Hooks and filters first, so that no connection meets a program without its maps. Devices are those of
    the calling thread's network namespace; their filters are known by what they are called, so they go
    also where the bpffs went before. A clsact goes where the maps say that it is ours, and nobody uses it.
    `cgroup_root` is only needed where the kernel has no cgroup links. Sockets that are connected already go
    on; flows whose packets were translated end.

    Raises Rejected while an agent has this bpffs root, or the devices of this network namespace, and where
    we may not remove.
    """
    with contextlib.ExitStack() as held:
        is_pinned = mounts.is_bpffs(bpffs_root) and bpffs_root.is_dir()
        try:
            if is_pinned:
                held.callback(FolderLock(bpffs_root).release)
            held.callback(NamespaceLock().release)
        except AlreadyExists as running:
            hint = "an agent that runs would put everything back: stop the agent first"
            raise Rejected(running.message, hint) from running
        if not is_pinned:
            return _remove_devices(frozenset())
        try:
            return _remove(Pins(bpffs_root), cgroup_root)
        except PermissionError as failure:
            message = f"cannot remove {failure.filename}: {failure.strerror}"
            raise Rejected(message, "run as root") from failure


def _remove(pins: Pins, cgroup_root: Path | None) -> list[str]:
    removed = programs.detach_all(pins, cgroup_root)
    if pins.links.is_dir():
        pins.links.rmdir()
    clsacts = (devices.former_clsacts(layout / "maps") for layout in pins.layouts())
    removed += _remove_devices(frozenset().union(*clsacts))
    for layout in list(pins.layouts()):
        shutil.rmtree(layout)
        removed.append(f"maps and programs {layout.name}")
    for link in (pins.current, pins.root / "current_new"):
        link.unlink(missing_ok=True)
    if not any(pins.root.iterdir()) and not pins.root.is_mount():
        pins.root.rmdir()
    return removed


def _remove_devices(clsacts: frozenset[int]) -> list[str]:
    """What was removed from devices, and our own; `clsacts`: by ifindex, where the clsact is ours."""
    removed = devices.detach_all() + devices.remove_clsacts(clsacts)
    if inlet.remove_inlet():
        removed.append(f"devices {inlet.INLET} and {inlet.OUTLET}")
    return removed
