"""A node: the host's place, the cgroup and the bpffs that are the node's, its pods and its agent."""

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from ebpfproxy.errors import AlreadyExists, ConfigError, KernelError
from ebpfproxy.lab import devices, leftovers
from ebpfproxy.lab.addresses import Addresses, Pair
from ebpfproxy.lab.agent import PROGRAM, Agent
from ebpfproxy.lab.pod import Pod
from ebpfproxy.lab.testbed import Testbed
from ebpfproxy.linux.netns import netns

_POD_DEVICES = "veth"  # how the names of the host's ends begin
_LONGEST_POD_NAME = 11  # with "veth" before it, a device's name: 15 characters


class Node:
    """- `host`: its network namespace, and a cgroup in which host processes run;
    - `name`: what the API server would call it;
    - `cgroup`: stands for the root of its cgroups; `bpffs`: empty at first;
    - `pods`: by their names.
    """

    def __init__(self, testbed: Testbed, addresses: Addresses, index: int) -> None:
        """The node with this index, joined to no other yet."""
        suffix = f"-{index + 1}" if index else ""
        self.index = index
        self.name = f"node-{addresses.number}{suffix}"
        self.pods: dict[str, Pod] = {}
        self.cgroup = testbed.cgroup / f"node{suffix}"
        self.bpffs = testbed.bpffs(f"bpf{suffix}")
        self.host = testbed.place(f"host{suffix}", self.cgroup, addresses.node(index))
        self._testbed = testbed
        self._addresses = addresses
        self._hosts = itertools.count(2)

    def pod(self, name: str, v4: str = "", v6: str = "") -> Pod:
        """Add a pod: a veth pair, addresses of both families, by default the node's next free ones.

        Raises AlreadyExists where the lab has a pod of that name, ConfigError for a name that is too long.
        """
        if name in self.pods:
            raise AlreadyExists(f"there is a pod {name} already")
        if not 0 < len(name) <= _LONGEST_POD_NAME:
            raise ConfigError(f"the pod name {name!r} is not of 1 to {_LONGEST_POD_NAME} characters")
        free = self._addresses.pod(self.index, next(self._hosts))
        pod = self._testbed.place(
            name, self.cgroup, Pair(v4 or free.v4, v6 or free.v6), f"{_POD_DEVICES}{name}"
        )
        devices.lead(self.host, self._addresses.gateway(self.index), pod, pod.device)
        self.pods[name] = pod
        return pod

    def forget_pod(self, pod: Pod) -> None:
        """Take a pod away: its processes, its devices, its addresses."""
        leftovers.remove_cgroup(pod.cgroup)
        pod.reap()
        netns.delete(pod.namespace)
        with contextlib.suppress(KernelError):  # gone with the namespace, unless a socket keeps it
            devices.ip(self.host, f"link del {pod.device}")
        del self.pods[pod.name]

    def agent(self, manifests: Path, *flags: str, wait: float = 60.0, before: Sequence[str] = ()) -> Agent:
        """Start the agent on this node with a folder of manifests, and await its first sync.

        `flags` come last, and win. `wait` is the patience in seconds; 0 returns at once. `before`: a command
        that starts what stands behind it, in another state. Raises AgentFailed.
        """
        agent = Agent(
            self.host,
            [
                f"--manifests={manifests}",
                f"--cgroup-root={self.cgroup}",
                f"--bpffs-root={self.bpffs}",
                f"--hostname-override={self.name}",
                "--detect-local-mode=InterfaceNamePrefix",
                f"--pod-interface-name-prefix={_POD_DEVICES}",
                "--healthz-bind-address=127.0.0.1:10256",
                "--metrics-bind-address=127.0.0.1:10249",
                *flags,
            ],
            [*before, *PROGRAM],
        )
        if wait:
            agent.await_sync(timeout=wait)
        return agent
