"""Removing everything that the eBPF dataplane put into the kernel."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.backends.ebpf import programs
from ebpfproxy.backends.ebpf.devices import filters
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.errors import AlreadyExists, Rejected
from ebpfproxy.linux import mounts
from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.linux.locks import FolderLock
from ebpfproxy.linux.netlink import reinjection


def remove(bpffs_root: Path, cgroup_root: Path | None, dry_run: bool = False) -> list[str]:
    """Detach and unpin all that is ours; returns what was removed, in order, and is empty where nothing was.

    Hooks and filters first, so that no connection meets a program without its maps. Devices are those of
    the calling thread's network namespace; their filters are known by what they are called, so they go
    also where the bpffs went before. A clsact goes where the maps say that it is ours, and no filter is in
    it. `cgroup_root` is only needed where the kernel has no cgroup links, or an agent was killed while it
    asked a program for its network namespace. Sockets that are connected already continue; flows whose
    packets were translated end.

    With `dry_run` nothing is touched, and what is returned is what would be removed; an agent may run.

    That no agent has the devices of this network namespace is for the caller to see to, by a NamespaceLock.
    Raises Rejected while one has this bpffs root, and where we may not remove.
    """
    if not dry_run:
        with alone(bpffs_root) as pins:
            return remove_held(pins, cgroup_root)
    with _permitted():
        return remove_held(Pins(bpffs_root) if _is_there(bpffs_root) else None, cgroup_root, dry_run=True)


@contextlib.contextmanager
def alone(bpffs_root: Path) -> Iterator[Pins | None]:
    """The pins below a bpffs root that no agent has within the block; None where there is no such folder.

    Raises Rejected while an agent has it, and where we may not change it.
    """
    if not _is_there(bpffs_root):
        yield None
        return
    try:
        lock = FolderLock(bpffs_root)
    except AlreadyExists as running:
        hint = "an agent that runs would put everything back: stop the agent first"
        raise Rejected(running.message, hint) from running
    try:
        with _permitted():
            yield Pins(bpffs_root)
    finally:
        lock.release()


def remove_held(pins: Pins | None, cgroup_root: Path | None, dry_run: bool = False) -> list[str]:
    """As `remove`, within `alone`."""
    removed = programs.detach_all(pins, cgroup_root, dry_run=dry_run) if pins else []
    clsacts = filters.former_clsacts(pins.pinned_maps("devices") if pins else ())
    removed += _remove_devices(pins, clsacts, dry_run)
    if pins:
        removed += [f"pins {path.name}" for path in pins.folders()]
        if maps := len(list(pins.maps.glob("*"))):
            removed.append(f"pins of {maps} maps")
    if cgroup_root:
        removed += [f"cgroup {name}" for name in cgroup.remove_temporary(cgroup_root, dry_run)]
    if pins and not dry_run:
        _unpin(pins)
    return removed


def _remove_devices(pins: Pins | None, clsacts: frozenset[int], dry_run: bool) -> list[str]:
    """What was removed from devices, and our own; `clsacts`: by ifindex, where the clsact is ours."""
    removed = filters.detach_all(pins.devices if pins else None, dry_run)
    removed += filters.remove_clsacts(clsacts, dry_run)
    if reinjection.has_inlet() if dry_run else reinjection.remove_inlet():
        removed.append(f"devices {reinjection.INLET} and {reinjection.OUTLET}")
    return removed


def _unpin(pins: Pins) -> None:
    for folder in (pins.links, pins.devices):
        if folder.is_dir():
            folder.rmdir()
    for path in list(pins.folders()):
        shutil.rmtree(path)
    if pins.maps.is_dir():
        shutil.rmtree(pins.maps)
    for link in (pins.current, pins.root / "current_new"):
        link.unlink(missing_ok=True)
    if not any(pins.root.iterdir()) and not pins.root.is_mount():
        pins.root.rmdir()


def _is_there(bpffs_root: Path) -> bool:
    return mounts.is_bpffs(bpffs_root) and bpffs_root.is_dir()


@contextlib.contextmanager
def _permitted() -> Iterator[None]:
    try:
        yield
    except PermissionError as failure:
        raise Rejected(f"cannot remove {failure.filename}: {failure.strerror}", "run as root") from failure
