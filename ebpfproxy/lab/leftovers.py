"""Taking a lab away by its name alone: its own end, and that of one that was killed, are the same."""

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

from ebpfproxy.errors import NotFound, Unsupported
from ebpfproxy.linux.netns import netns

RUN = Path("/run")
_PATIENCE = 10.0


def cgroup_mount() -> Path:
    """Where cgroup v2 is mounted. Raises Unsupported where it is not."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, where, kind, *_ = line.split(" ")
        if kind == "cgroup2":
            return Path(where)
    raise Unsupported("cgroup v2 is not mounted", "mount -t cgroup2 none /sys/fs/cgroup")


def remove(identity: str) -> None:
    """Take away every process, cgroup, mount, folder and namespace of the lab; none of them need exist.

    `identity` is ebpfproxy-<name>-<pid>. Processes first, then what they held.
    """
    remove_cgroup(cgroup_mount() / identity)
    folder = RUN / identity
    for mount in _mounts_below(folder):
        subprocess.run(["umount", "--lazy", mount], check=True, capture_output=True)
    _remove_folder(folder)
    for name in netns.names(f"{identity}-"):
        with contextlib.suppress(NotFound):
            netns.delete(name)


def remove_cgroup(top: Path) -> None:
    """End what runs in the cgroup and below, and take it away; nothing where it does not exist."""
    if not top.is_dir():
        return
    _end_processes(top)
    folders = [path for path in top.rglob("*") if path.is_dir()]
    for folder in sorted([*folders, top], key=lambda path: len(path.parts), reverse=True):
        folder.rmdir()


def sweep(name: str) -> None:
    """Take away the labs of that name whose process is gone."""
    pattern = re.compile(rf"ebpfproxy-{re.escape(name)}-(\d+)(?:-.*)?")
    places = [cgroup_mount(), RUN, netns.FOLDER]
    found = {entry.name for place in places if place.is_dir() for entry in place.iterdir()}
    pids = {int(match[1]) for match in map(pattern.fullmatch, found) if match}
    for pid in sorted(pids):
        if not Path(f"/proc/{pid}").exists():
            remove(f"ebpfproxy-{name}-{pid}")


def _end_processes(top: Path) -> None:
    """Kill all in the cgroup and below, those that are being forked too, and await their end."""
    deadline = time.monotonic() + _PATIENCE
    with open(top / "cgroup.events") as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        while "populated 1" in events.read() and time.monotonic() < deadline:
            for file in top.rglob("cgroup.procs"):
                for pid in file.read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            poll.poll(100)
            events.seek(0)


def _mounts_below(folder: Path) -> list[str]:
    mounts = [line.split(" ")[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [mount for mount in reversed(mounts) if Path(mount).is_relative_to(folder)]


def _remove_folder(folder: Path) -> None:
    if not folder.is_dir():
        return
    for path in sorted(folder.rglob("*"), key=lambda path: len(path.parts), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()
