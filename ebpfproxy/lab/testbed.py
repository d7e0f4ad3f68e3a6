"""What a lab stands on: its name on this machine, its folder, and the places made in it."""

import os
import subprocess
from pathlib import Path

from ebpfproxy.errors import AlreadyExists, KernelError
from ebpfproxy.lab import leftovers
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.lab.pod import Pod
from ebpfproxy.linux.netns import netns

_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/conf/all/rp_filter": "1",
    "net/ipv4/conf/default/rp_filter": "1",
    "net/ipv6/conf/all/disable_ipv6": "0",
    "net/ipv6/conf/all/forwarding": "1",
    "net/ipv6/conf/default/forwarding": "1",
    # Without duplicate address detection an IPv6 address serves at once, not after a second.
    "net/ipv6/conf/all/accept_dad": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/core/somaxconn": "65535",
    # Sockets of SOCK_DGRAM and IPPROTO_ICMP, which pings are sent with: for any group.
    "net/ipv4/ping_group_range": "0 2147483647",
}


class Testbed:
    """`identity` is ebpfproxy-<name>-<pid>; cgroups, folders and namespaces of the lab are called so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.identity = f"ebpfproxy-{name}-{os.getpid()}"
        self.run = leftovers.RUN / self.identity
        self._places: list[Pod] = []

    @property
    def cgroup(self) -> Path:
        """Above all cgroups of the lab, those of nodes and those of everybody outside."""
        return leftovers.cgroup_mount() / self.identity

    def prepare(self) -> None:
        """Take away what a killed process left. Raises AlreadyExists where this lab is there already."""
        leftovers.sweep(self.name)
        if self.cgroup.exists():
            raise AlreadyExists(f"the lab {self.identity} exists already")

    def folder(self, name: str) -> Path:
        path = self.run / name
        path.mkdir(parents=True)
        return path

    def bpffs(self, name: str) -> Path:
        """An empty bpffs. Raises KernelError."""
        path = self.folder(name)
        command = ["mount", "-t", "bpf", "-o", "mode=0700", "bpf", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelError(f"{' '.join(command)}: {done.stderr.strip()}")
        return path

    def place(self, name: str, parent: Path, addresses: Pair, device: str = "") -> Pod:
        """A network namespace, and a cgroup below `parent`. It gets its addresses when it is joined."""
        namespace, cgroup = f"{self.identity}-{name}", parent / name
        netns.create(namespace)
        cgroup.mkdir(parents=True)
        with netns.entered(netns.path(namespace)):
            for key, value in _SYSCTLS.items():
                (Path("/proc/sys") / key).write_text(value)
        return self._remember(Pod(name, namespace, cgroup, *addresses, device))

    def bypassing(self, pod: Pod) -> Pod:
        """The pod once more, in a cgroup that is no node's: see `Lab.bypassing`."""
        cgroup = self.cgroup / "bypassing" / pod.name
        cgroup.mkdir(parents=True, exist_ok=True)
        return self._remember(Pod(pod.name, pod.namespace, cgroup, pod.v4, pod.v6, pod.device))

    def remove(self) -> None:
        """Take everything away; nothing of it need exist."""
        leftovers.remove(self.identity)
        for place in self._places:
            place.reap()

    def _remember(self, place: Pod) -> Pod:
        self._places.append(place)
        return place
