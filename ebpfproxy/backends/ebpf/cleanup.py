"""Removes everything that the eBPF backend created in the kernel."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.backends.ebpf import programs
from ebpfproxy.backends.ebpf.devices import filters, xdp
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.errors import AlreadyExists, Rejected
from ebpfproxy.linux import mounts
from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.linux.locks import FolderLock
from ebpfproxy.linux.netlink import dummy, geneve, on_link_routes, reinjection


def remove(bpffs_root: Path, cgroup_root: Path | None, dry_run: bool = False) -> list[str]:
    """Detach and unpin all objects of ebpfproxy. Return what was removed, in order, one line each; empty if
    nothing existed.

    Hooks and filters are detached first, so that no program runs without its maps. The devices are those of
    the calling thread's network namespace. Filters are identified by their name, so they are removed even if
    the bpffs no longer exists. A clsact is removed if the maps record it as the agent's and it has no filter.

    `cgroup_root` is only needed where the kernel has no cgroup links, or to remove temporary cgroups. An
    agent leaves one if it is killed while a program determines the cookie of its network namespace.

    Connected sockets stay connected. Flows whose packets were translated end.

    With `dry_run` nothing changes, and the result is what would be removed. An agent may be running then.

    The caller ensures by a NamespaceLock that no agent uses the devices of this network namespace. Raises
    Rejected if an agent uses this bpffs root, or if permissions are missing.
    """
    if not dry_run:
        with alone(bpffs_root) as pins:
            return remove_held(pins, cgroup_root)
    with _permitted():
        return remove_held(Pins(bpffs_root) if _is_there(bpffs_root) else None, cgroup_root, dry_run=True)


@contextlib.contextmanager
def alone(bpffs_root: Path) -> Iterator[Pins | None]:
    """The pins below a bpffs root, locked against agents within the block. None if there is no such folder.

    Raises Rejected if an agent uses it, or if permissions are missing.
    """
    if not _is_there(bpffs_root):
        yield None
        return
    try:
        lock = FolderLock(bpffs_root)
    except AlreadyExists as running:
        hint = "stop the agent first, because it would restore everything"
        raise Rejected(running.message, hint) from running
    try:
        with _permitted():
            yield Pins(bpffs_root)
    finally:
        lock.release()


def remove_held(pins: Pins | None, cgroup_root: Path | None, dry_run: bool = False) -> list[str]:
    """Like `remove`, for callers within `alone`. `pins`: None if the bpffs root does not exist."""
    removed = programs.detach_all(pins, cgroup_root, dry_run=dry_run) if pins else []
    clsacts = filters.previous_clsacts(pins.pinned_maps("devices") if pins else ())
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
    """Remove routes of frontends, XDP links, filters, links and clsacts, and the devices of the agent. Return
    what was removed.

    `clsacts`: ifindexes of devices whose clsact the agent created.
    """
    routes = on_link_routes.remove_all(dry_run)  # they need the programs
    removed = [f"{routes} routes of frontends"] if routes else []
    removed += xdp.detach_all(pins.xdp, dry_run) if pins else []
    removed += filters.detach_all(pins.devices if pins else None, dry_run)
    removed += filters.remove_clsacts(clsacts, dry_run)
    if reinjection.has_pair() if dry_run else reinjection.remove_pair():
        removed.append(f"devices {reinjection.DEVICE} and {reinjection.PEER}")
    if geneve.find() if dry_run else geneve.remove():
        removed.append(f"device {geneve.DEVICE}")
    if dummy.exists(dummy.VIPS) if dry_run else dummy.remove(dummy.VIPS):
        removed.append(f"device {dummy.VIPS}")
    return removed


def _unpin(pins: Pins) -> None:
    for folder in (pins.links, pins.devices, pins.xdp):
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
