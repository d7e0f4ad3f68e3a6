"""Nodes of their own: network namespaces for their hosts, for each pod, and for a client outside."""

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
    """A node, its pods and a client outside, from `with Lab() as lab:` to the end of the block.

    - `lab.node`: the host's network namespace and a cgroup in which host processes run;
    - `lab.outside`: a client on the node's network, whose default route is the node, and whose sockets
      the node's cgroup does not hold, as those of another machine;
    - `lab.pod(name)`: a pod, whose gateway is the node (veth pair, addresses of both families);
    - `lab.cgroup`: the cgroup that stands for the root of the node's cgroups;
    - `lab.bpffs`: an empty bpffs; `lab.folder`: an empty folder beside it.

    With `pods`, which says how pods of different nodes reach each other, there are two nodes:
    `lab.nodes`, and all of the above is the first one's. Both of them and the client have a link of
    their own to `lab.router`, whose ends are called node, node-2 and outside. `lab.backbone.join`
    changes how pods reach each other.

    All are called ebpfproxy-<name>-<pid>, and `number` (1 to 254) is in all addresses, so that labs
    can stand side by side. Everything is gone at the block's end, also after an exception, Ctrl-C,
    SIGTERM or SIGHUP; what a killed process left goes when the next lab of that name starts.

    Entering raises ConfigError without root, KernelError where the machine lacks something.
    """

    node: Pod
    router: Pod
    outside: Pod
    nodes: tuple[Node, ...]
    backbone: Backbone

    def __init__(self, name: str = "lab", number: int = 1, pods: PodNetwork | None = None) -> None:
        self.name = name
        self.number = number
        self.addresses = Addresses(number)
        self._pod_network = pods
        self._testbed = Testbed(name)
        self._owner = os.getpid()
        self._heeded: list[signal.Signals] = []

    def __enter__(self) -> "Lab":
        if os.geteuid():
            raise ConfigError("network namespaces and BPF need root", "run it with sudo")
        self._testbed.prepare()
        atexit.register(self._remove)
        self._heed_signals()
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

    def forget_pod(self, pod: Pod) -> None:
        """Take a pod of the first node away: its processes, its devices, its addresses."""
        self.nodes[0].forget_pod(pod)

    def bypassing(self, pod: Pod) -> Pod:
        """The pod, as one whose sockets its node never sees, such as a virtual machine.

        It has the pod's network namespace, but a cgroup outside the node's.
        """
        return self._testbed.bypassing(pod)

    def agent(self, manifests: Path, *flags: str, wait: float = 60.0, before: Sequence[str] = ()) -> Agent:
        """Start the agent on the first node: see `Node.agent`."""
        return self.nodes[0].agent(manifests, *flags, wait=wait, before=before)

    def ip(self, place: Pod, *commands: str) -> None:
        """Run `ip` commands in a place, all in one batch. Raises KernelError with what ip said."""
        devices.ip(place, *commands)

    def _build(self) -> None:
        self.folder = self._testbed.folder("files")
        count = 2 if self._pod_network else 1
        self.nodes = tuple(Node(self._testbed, self.addresses, index) for index in range(count))
        self.node = self.nodes[0].host
        self.outside = self._testbed.place("outside", self._testbed.cgroup, self.addresses.outside, "eth0")
        if self._pod_network:
            self._route(self._pod_network)
        else:
            devices.link(self.node, self.outside)

    def _route(self, kind: PodNetwork) -> None:
        gateway, further = self.addresses.router, self.addresses.further_network
        self.router = self._testbed.place("router", self._testbed.cgroup, gateway)
        for node in self.nodes:
            devices.lead(self.router, gateway, node.host, node.cgroup.name)
        devices.lead(self.router, gateway, self.outside, "outside")
        devices.ip(
            self.router,
            "link set lo up",
            f"route add {further.v4} via {self.outside.v4}",
            f"route add {further.v6} via {self.outside.v6}",
        )
        self.backbone = Backbone(self.addresses, self.router, self.nodes)
        self.backbone.join(kind)

    def _heed_signals(self) -> None:
        """Unless the process already does, let SIGTERM and a closed terminal unwind the stack as Ctrl-C
        does."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError):  # not the main thread: its signals are not ours
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _exit_by_signal)
                    self._heeded.append(number)

    def _end(self) -> None:
        """Remove everything, undisturbed by a second Ctrl-C."""
        if os.getpid() != self._owner:
            return
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self._remove()
            atexit.unregister(self._remove)
            while self._heeded:
                signal.signal(self._heeded.pop(), signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _remove(self) -> None:
        if os.getpid() == self._owner:
            self._testbed.remove()


def _exit_by_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
