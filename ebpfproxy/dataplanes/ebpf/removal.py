"""Removing everything that the eBPF dataplane put into the kernel."""

import shutil
from pathlib import Path

from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.dataplanes.ebpf.programs import detach_all
from ebpfproxy.kernel import mounts


def remove(bpffs_root: Path, cgroup_root: Path | None) -> list[str]:
    """Detach and unpin all that is ours; returns what was removed, in order, and is empty where nothing was.

    Hooks first, so that no connection meets a program without its maps. `cgroup_root` is only needed
    where the kernel has no cgroup links. Sockets that are connected already go on.
    """
    if not bpffs_root.is_dir() or not mounts.is_bpffs(bpffs_root):
        return []
    pins = Pins(bpffs_root)
    removed = detach_all(pins, cgroup_root)
    if pins.links.is_dir():
        pins.links.rmdir()
    for layout in list(pins.layouts()):
        shutil.rmtree(layout)
        removed.append(f"maps and programs {layout.name}")
    for link in (pins.current, bpffs_root / "current_new"):
        link.unlink(missing_ok=True)
    if not any(bpffs_root.iterdir()) and not bpffs_root.is_mount():
        bpffs_root.rmdir()
    return removed
