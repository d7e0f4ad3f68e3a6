"""The lab: one or more nodes with their pods, and a client outside, each in a network namespace."""

import atexit
import contextlib
import os
import signal
import types
from collections.abc import Sequence
from pathlib import Path

from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import devices
from ebpfproxy.lab.addresses import Addresses
from ebpfproxy.lab.agent import Agent
from ebpfproxy.lab.node import Node
from ebpfproxy.lab.pod import Pod
from ebpfproxy.lab.pod_network import Backbone, PodNetwork
from ebpfproxy.lab.testbed import Testbed


class Lab:
    """A node, its pods and a client outside, for the block of `with Lab() as lab:`.

    - `lab.node`: the host's network namespace, and the cgroup of host processes;
    - `lab.outside`: a client on the node's network. Its default route is the node. Its sockets are outside
      the node's cgroup, as those of another machine;
    - `lab.pod(name)`: a pod with a veth pair, addresses of both families and the node as gateway;
    - `lab.cgroup`: the cgroup that replaces the root of the node's cgroups;
    - `lab.bpffs`: an empty bpffs; `lab.folder`: an empty folder.

    With `pods`, there are `nodes` nodes: `lab.nodes`. `pods` is the pod network between them, which
    `lab.backbone.join` changes. All attributes above are then those of the first node. The nodes and the
    client have a link to `lab.router`. The router's devices are node, node-2 and so on, and outside.

    With `edges`, so many machines outside the cluster also have a link to the router: `lab.edges`. The
    router's devices to them are edge-1 and so on. The router has no route to the networks `addresses.vips`.

    The names of all objects begin with ebpfproxy-<name>-<pid>. `number` (1 to 254) is part of all addresses,
    so that several labs can exist at the same time. Everything is removed at the end of the block, also
    after an exception, Ctrl-C, SIGTERM or SIGHUP. The remains of a killed process are removed when the next
    lab of the same name starts.

    Entering raises ConfigError without root, KernelError if the machine lacks a feature.
    """

    node: Pod
    router: Pod
    outside: Pod
    nodes: tuple[Node, ...]
    backbone: Backbone

    edges: tuple[Node, ...] = ()

    def __init__(
        self,
        name: str = "lab",
        number: int = 1,
        pods: PodNetwork | None = None,
        nodes: int = 2,
        edges: int = 0,
    ) -> None:
        self._edge_count = edges
        self.name = name
        self.number = number
        self.addresses = Addresses(number)
        self._pod_network = pods
        self._count = nodes if pods else 1
        self._testbed = Testbed(name)
        self._owner = os.getpid()
        self._handled_signals: list[signal.Signals] = []

    def __enter__(self) -> "Lab":
        if os.geteuid():
            raise ConfigError("cannot create network namespaces without root", "run the command with sudo")
        self._testbed.prepare()
        atexit.register(self._remove)
        self._handle_signals()
        try:
            self._build()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._end()

    @property
    def identity(self) -> str:
        return self._testbed.identity

    @property
    def node_name(self) -> str:
        return self.nodes[0].name

    @property
    def cgroup(self) -> Path:
        return self.nodes[0].cgroup

    @property
    def bpffs(self) -> Path:
        return self.nodes[0].bpffs

    @property
    def pods(self) -> dict[str, Pod]:
        return self.nodes[0].pods

    def pod(self, name: str, v4: str = "", v6: str = "") -> Pod:
        """Add a pod to the first node: see `Node.pod`."""
        return self.nodes[0].pod(name, v4, v6)

    def remove_pod(self, pod: Pod) -> None:
        """Remove a pod of the first node: its processes, devices and addresses."""
        self.nodes[0].remove_pod(pod)

    def bypassing(self, pod: Pod) -> Pod:
        """Return the pod with a cgroup outside the node's, so that its sockets bypass the socket hooks.

        It has the same network namespace. A virtual machine, for example, is such a pod.
        """
        return self._testbed.bypassing(pod)

    def agent(self, manifests: Path, *flags: str, wait: float = 60.0, before: Sequence[str] = ()) -> Agent:
        """Start the agent on the first node: see `Node.agent`."""
        return self.nodes[0].agent(manifests, *flags, wait=wait, before=before)

    def ip(self, pod: Pod, *commands: str) -> None:
        """Run `ip` commands in a network namespace, in one batch. Raises KernelError with the error of ip."""
        devices.ip(pod, *commands)

    def _build(self) -> None:
        self.folder = self._testbed.folder("files")
        self.nodes = tuple(Node(self._testbed, self.addresses, index) for index in range(self._count))
        self.node = self.nodes[0].host
        self.outside = self._testbed.create_netns(
            "outside", self._testbed.cgroup, self.addresses.outside, "eth0"
        )
        if self._pod_network:
            self._route(self._pod_network)
        else:
            devices.connect_directly(self.node, self.outside)

    def _route(self, kind: PodNetwork) -> None:
        gateway, further = self.addresses.router, self.addresses.further_network
        self.router = self._testbed.create_netns("router", self._testbed.cgroup, gateway)
        for node in self.nodes:
            devices.connect_routed(self.router, gateway, node.host, node.cgroup.name)
        devices.connect_routed(self.router, gateway, self.outside, "outside")
        self.edges = tuple(
            Node(self._testbed, self.addresses, index, is_edge=True) for index in range(self._edge_count)
        )
        for edge in self.edges:
            link = self.addresses.edge_link(edge.index)
            devices.connect_by_link(self.router, link.router, edge.host, edge.cgroup.name)
        devices.ip(
            self.router,
            "link set lo up",
            f"route add {further.v4} via {self.outside.v4}",
            f"route add {further.v6} via {self.outside.v6}",
        )
        self.backbone = Backbone(self.addresses, self.router, self.nodes)
        self.backbone.join(kind)

    def _handle_signals(self) -> None:
        """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, unless the process handles them already."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError):  # not the main thread, which alone can set handlers
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _exit_by_signal)
                    self._handled_signals.append(number)

    def _end(self) -> None:
        """Remove everything. A second Ctrl-C does not interrupt it."""
        if os.getpid() != self._owner:
            return
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self._remove()
            atexit.unregister(self._remove)
            while self._handled_signals:
                signal.signal(self._handled_signals.pop(), signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _remove(self) -> None:
        if os.getpid() == self._owner:
            self._testbed.remove()


def _exit_by_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
