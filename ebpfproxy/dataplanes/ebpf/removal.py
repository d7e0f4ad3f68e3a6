"""Removing everything that the eBPF dataplane put into the kernel."""

import shutil
from pathlib import Path

from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.dataplanes.ebpf.programs import detach_all
from ebpfproxy.errors import AlreadyExists, Rejected
from ebpfproxy.kernel import mounts
from ebpfproxy.kernel.lock import FolderLock


def remove(bpffs_root: Path, cgroup_root: Path | None) -> list[str]:
    """Detach and unpin all that is ours; returns what was removed, in order, and is empty where nothing was.

    Hooks first, so that no connection meets a program without its maps. `cgroup_root` is only needed
    where the kernel has no cgroup links. Sockets that are connected already go on.

    Raises Rejected while an agent has this bpffs root, and where we may not remove.
    """
    if not mounts.is_bpffs(bpffs_root) or not bpffs_root.is_dir():
        return []
    pins = Pins(bpffs_root)
    try:
        lock = FolderLock(bpffs_root)
    except AlreadyExists as held:
        hint = "an agent that runs would put everything back: stop the agent first"
        raise Rejected(held.message, hint) from held
    try:
        return _remove(pins, cgroup_root)
    except PermissionError as failure:
        raise Rejected(f"cannot remove {failure.filename}: {failure.strerror}", "run as root") from failure
    finally:
        lock.release()


def _remove(pins: Pins, cgroup_root: Path | None) -> list[str]:
    removed = detach_all(pins, cgroup_root)
    if pins.links.is_dir():
        pins.links.rmdir()
    for layout in list(pins.layouts()):
        shutil.rmtree(layout)
        removed.append(f"maps and programs {layout.name}")
    for link in (pins.current, pins.root / "current_new"):
        link.unlink(missing_ok=True)
    if not any(pins.root.iterdir()) and not pins.root.is_mount():
        pins.root.rmdir()
    return removed
