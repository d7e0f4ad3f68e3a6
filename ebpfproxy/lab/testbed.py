"""The base of a lab: its name on this machine, its folder, its network namespaces, and their removal.

`remove_lab` finds the parts of a lab by its name alone. Thus a lab at its end and the remains of a killed
process are removed by the same code.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Unsupported
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.lab.pod import Pod
from ebpfproxy.linux.netns import netns

RUN = Path("/run")
_KILL_TIMEOUT = 60.0  # seconds; an agent that ends frees its maps first

_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/conf/all/rp_filter": "1",
    "net/ipv4/conf/default/rp_filter": "1",
    "net/ipv6/conf/all/disable_ipv6": "0",
    "net/ipv6/conf/all/forwarding": "1",
    "net/ipv6/conf/default/forwarding": "1",
    # Without duplicate address detection an IPv6 address is usable at once, not after a second.
    "net/ipv6/conf/all/accept_dad": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/core/somaxconn": "65535",
    # Allow ping sockets (SOCK_DGRAM, IPPROTO_ICMP) for any group.
    "net/ipv4/ping_group_range": "0 2147483647",
}


class Testbed:
    """Creates and removes the parts of a lab.

    `identity` is ebpfproxy-<name>-<pid>. Names of cgroups, folders and namespaces begin with it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.identity = f"ebpfproxy-{name}-{os.getpid()}"
        self.run = RUN / self.identity
        self._created: list[Pod] = []

    @property
    def cgroup(self) -> Path:
        """The parent of all cgroups of the lab, those of nodes and those outside of nodes."""
        return cgroup_mount() / self.identity

    def prepare(self) -> None:
        """Remove the labs of this name whose process was killed. Raises AlreadyExists if this lab exists."""
        remove_stale_labs(self.name)
        if self.cgroup.exists():
            raise AlreadyExists(f"lab {self.identity} already exists")

    def folder(self, name: str) -> Path:
        path = self.run / name
        path.mkdir(parents=True)
        return path

    def bpffs(self, name: str) -> Path:
        """Mount an empty bpffs. Raises KernelError."""
        path = self.folder(name)
        command = ["mount", "-t", "bpf", "-o", "mode=0700", "bpf", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelError(f"cannot mount bpffs: {' '.join(command)}: {done.stderr.strip()}")
        return path

    def create_netns(self, name: str, parent: Path, addresses: Pair, device: str = "") -> Pod:
        """Create a network namespace, and a cgroup below `parent`.

        It gets its addresses when it is connected: see `devices`.
        """
        namespace, cgroup = f"{self.identity}-{name}", parent / name
        netns.create(namespace)
        cgroup.mkdir(parents=True)
        with netns.entered(netns.path(namespace)):
            for key, value in _SYSCTLS.items():
                (Path("/proc/sys") / key).write_text(value)
        return self._register(Pod(name, namespace, cgroup, *addresses, device))

    def bypassing(self, pod: Pod) -> Pod:
        """Return the pod's network namespace with a cgroup outside every node: see `Lab.bypassing`."""
        cgroup = self.cgroup / "bypassing" / pod.name
        cgroup.mkdir(parents=True, exist_ok=True)
        return self._register(Pod(pod.name, pod.namespace, cgroup, pod.v4, pod.v6, pod.device))

    def remove(self) -> None:
        """Remove all parts of the lab. They need not exist."""
        for pod in self._created:
            pod.reap()  # first: a new child may not have entered its cgroup yet
        remove_lab(self.identity)

    def _register(self, pod: Pod) -> Pod:
        self._created.append(pod)
        return pod


def cgroup_mount() -> Path:
    """Return the mount point of cgroup v2. Raises Unsupported if it is not mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, mount_point, file_system, *_ = line.split(" ")
        if file_system == "cgroup2":
            return Path(mount_point)
    raise Unsupported("cgroup v2 is not mounted", "run mount -t cgroup2 none /sys/fs/cgroup")


def remove_lab(identity: str) -> None:
    """Remove every process, cgroup, mount, folder and namespace of a lab. They need not exist.

    `identity` is ebpfproxy-<name>-<pid>. Processes are killed first, because they use the other parts.
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
    """Kill the processes in the cgroup and below, then remove it. Does nothing if it does not exist."""
    if not top.is_dir():
        return
    _kill_processes(top)
    folders = [path for path in top.rglob("*") if path.is_dir()]
    for folder in sorted([*folders, top], key=lambda path: len(path.parts), reverse=True):
        folder.rmdir()


def remove_stale_labs(name: str) -> None:
    """Remove the labs of this name whose process no longer exists."""
    pattern = re.compile(rf"ebpfproxy-{re.escape(name)}-(\d+)(?:-.*)?")
    folders = [cgroup_mount(), RUN, netns.FOLDER]
    names = {entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir()}
    pids = {int(match[1]) for match in map(pattern.fullmatch, names) if match}
    for pid in sorted(pids):
        if not Path(f"/proc/{pid}").exists():
            remove_lab(f"ebpfproxy-{name}-{pid}")


def _kill_processes(top: Path) -> None:
    """Kill all processes in the cgroup and below, also those being forked, and wait for their end."""
    deadline = time.monotonic() + _KILL_TIMEOUT
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
