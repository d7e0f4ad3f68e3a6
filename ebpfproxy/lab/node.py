"""A node of the lab: the host's network namespace, a cgroup, a bpffs, pods and the agent."""

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from ebpfproxy.errors import AlreadyExists, ConfigError, KernelError
from ebpfproxy.lab import devices
from ebpfproxy.lab.addresses import Addresses, Pair
from ebpfproxy.lab.agent import PROGRAM, Agent
from ebpfproxy.lab.pod import Pod
from ebpfproxy.lab.testbed import Testbed, remove_cgroup
from ebpfproxy.linux.netns import netns

_POD_DEVICES = "veth"  # the prefix of the names of pod devices on the host
_LONGEST_POD_NAME = 11  # with the prefix "veth", this makes a device name of 15 characters


class Node:
    """A node.

    - `host`: the host's network namespace, and the cgroup of host processes;
    - `name`: the name of its Node object;
    - `cgroup`: replaces the root of its cgroups; `bpffs`: its bpffs, empty at first;
    - `pods`: its pods by name.
    """

    def __init__(self, testbed: Testbed, addresses: Addresses, index: int, *, is_edge: bool = False) -> None:
        """Create the node with this index. It is not connected yet. An edge is a machine without a Node."""
        suffix = f"-{index + 1}" if index or is_edge else ""
        kind = "edge" if is_edge else "node"
        self.index = index
        self.name = f"{kind}-{addresses.number}{suffix}"
        self.pods: dict[str, Pod] = {}
        self.cgroup = testbed.cgroup / f"{kind}{suffix}"
        self.bpffs = testbed.bpffs(f"bpf-edge{suffix}" if is_edge else f"bpf{suffix}")
        own = addresses.edge_link(index).edge if is_edge else addresses.node(index)
        self.host = testbed.create_netns(f"edge{suffix}" if is_edge else f"host{suffix}", self.cgroup, own)
        self._testbed = testbed
        self._addresses = addresses
        self._hosts = itertools.count(2)

    def pod(self, name: str, v4: str = "", v6: str = "") -> Pod:
        """Add a pod with a veth pair and addresses of both families; the default is the next free ones.

        Raises AlreadyExists if the node has a pod of this name, ConfigError if the name is too long.
        """
        if name in self.pods:
            raise AlreadyExists(f"pod {name} already exists")
        if not 0 < len(name) <= _LONGEST_POD_NAME:
            raise ConfigError(f"pod name {name!r} must have 1 to {_LONGEST_POD_NAME} characters")
        host = next(self._hosts)
        free = self._addresses.pod(self.index, host)
        # As kubelet's cgroups are: the agent recognizes a pod by them.
        uid = f"{self._addresses.number:08x}-0000-4000-8000-{host:012x}"
        pod = self._testbed.create_netns(
            name,
            self.cgroup / "kubepods" / f"pod{uid}",
            Pair(v4 or free.v4, v6 or free.v6),
            f"{_POD_DEVICES}{name}",
        )
        devices.connect_routed(self.host, self._addresses.gateway(self.index), pod, pod.device)
        self.pods[name] = pod
        pause = pod.popen(["sleep", "infinity"])  # as a container runtime's pause process
        (pod.cgroup / "cgroup.procs").write_text(str(pause.pid))
        return pod

    def remove_pod(self, pod: Pod) -> None:
        """Remove a pod: its processes, devices and addresses."""
        pod.reap()
        remove_cgroup(pod.cgroup.parent)
        netns.delete(pod.namespace)
        with contextlib.suppress(KernelError):  # deleted with the namespace, unless a socket keeps that
            devices.ip(self.host, f"link del {pod.device}")
        del self.pods[pod.name]

    def agent(self, manifests: Path, *flags: str, wait: float = 60.0, before: Sequence[str] = ()) -> Agent:
        """Start the agent on this node with a folder of manifests, and wait for its first sync.

        `flags` come last and override the defaults. `wait` is the timeout in seconds; 0: do not wait.
        `before` is a command that runs the agent, such as one that drops capabilities. Raises AgentFailed.
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
