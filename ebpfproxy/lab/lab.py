"""A node of its own: one network namespace for the host, one for each pod, one for a client outside."""

import atexit
import contextlib
import itertools
import os
import signal
import subprocess
import types
from pathlib import Path

from ebpfproxy.errors import AlreadyExists, ConfigError, KernelError
from ebpfproxy.kernel import netns
from ebpfproxy.lab import leftovers
from ebpfproxy.lab.agent import Agent
from ebpfproxy.lab.pod import Pod

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
}
_LONGEST_POD_NAME = 11  # with "veth" before it, a device's name: 15 characters


class Lab:
    """A node, its pods and a client outside, from `with Lab() as lab:` to the end of the block.

    - `lab.node`: the host's network namespace and a cgroup in which host processes run;
    - `lab.outside`: a client on the node's network, whose default route is the node, and whose sockets
      the node's cgroup does not hold, as those of another machine;
    - `lab.pod(name)`: a pod, whose gateway is the node (veth pair, addresses of both families);
    - `lab.cgroup`: the cgroup that stands for the root of the node's cgroups;
    - `lab.bpffs`: an empty bpffs; `lab.folder`: an empty folder beside it.

    All are called ebpfproxy-<name>-<pid>, and `number` (1 to 254) is in all addresses, so that labs
    can stand side by side. Everything is gone at the block's end, also after an exception, Ctrl-C,
    SIGTERM or SIGHUP; what a killed process left goes when the next lab of that name starts.

    Entering raises ConfigError without root, KernelError where the machine lacks something.
    """

    def __init__(self, name: str = "lab", number: int = 1) -> None:
        self.name = name
        self.number = number
        self.identity = f"ebpfproxy-{name}-{os.getpid()}"
        self.node_name = f"node-{number}"
        self.pods: dict[str, Pod] = {}
        self._owner = os.getpid()
        self._heeded: list[signal.Signals] = []
        self._indices = itertools.count(2)
        self._places: list[Pod] = []

    def __enter__(self) -> "Lab":
        if os.geteuid():
            raise ConfigError("network namespaces and BPF need root", "run it with sudo")
        leftovers.sweep(self.name)
        top = leftovers.cgroup_mount() / self.identity
        self.cgroup = top / "node"
        self.folder = leftovers.RUN / self.identity / "files"
        self.bpffs = leftovers.RUN / self.identity / "bpf"
        if top.exists():
            raise AlreadyExists(f"the lab {self.identity} exists already")
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

    def pod(self, name: str, v4: str = "", v6: str = "") -> Pod:
        """Add a pod. Addresses default to the next free ones of 10.244.N.0/24 and fd00:10:244:N::/64.

        Raises AlreadyExists where the lab has a pod of that name, ConfigError for a name that is too long.
        """
        if name in self.pods:
            raise AlreadyExists(f"there is a pod {name} already")
        if not 0 < len(name) <= _LONGEST_POD_NAME:
            raise ConfigError(f"the pod name {name!r} is not of 1 to {_LONGEST_POD_NAME} characters")
        index = next(self._indices)
        v4, v6 = v4 or f"10.244.{self.number}.{index}", v6 or f"fd00:10:244:{self.number}::{index:x}"
        pod = self._place(name, v4, v6, f"veth{name}")
        self._connect(pod)
        self.pods[name] = pod
        return pod

    def forget_pod(self, pod: Pod) -> None:
        """Take a pod away: its processes, its devices, its addresses."""
        leftovers.remove_cgroup(pod.cgroup)
        pod.reap()
        netns.delete(pod.namespace)
        with contextlib.suppress(KernelError):  # gone with the namespace, unless a socket keeps it
            self.ip(self.node, f"link del {pod.device}")
        del self.pods[pod.name]

    def agent(self, manifests: Path, *flags: str, wait: float = 60.0) -> Agent:
        """Start the agent on this node with a folder of manifests, and await its first sync.

        `flags` come last, and win. `wait` is the patience in seconds; 0 returns at once.
        Raises AgentFailed.
        """
        agent = Agent(
            self.node,
            [
                f"--manifests={manifests}",
                f"--cgroup-root={self.cgroup}",
                f"--bpffs-root={self.bpffs}",
                f"--hostname-override={self.node_name}",
                "--healthz-bind-address=127.0.0.1:10256",
                "--metrics-bind-address=127.0.0.1:10249",
                *flags,
            ],
        )
        if wait:
            agent.await_sync(timeout=wait)
        return agent

    def ip(self, place: Pod, *commands: str) -> None:
        """Run `ip` commands in a place, all in one batch. Raises KernelError with what ip said."""
        done = subprocess.run(
            ["ip", "-n", place.namespace, "-batch", "-"],
            input="\n".join(commands),
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise KernelError(f"ip -n {place.namespace}: {done.stderr.strip()}")

    def _build(self) -> None:
        self.cgroup.mkdir(parents=True)
        self.folder.mkdir(parents=True)
        self.bpffs.mkdir()
        _command("mount", "-t", "bpf", "-o", "mode=0700", "bpf", str(self.bpffs))
        four, six = f"172.18.{self.number}", f"fd00:172:18:{self.number}:"
        self.node = self._place("host", f"{four}.2", f"{six}:2", "")
        elsewhere = self.cgroup.parent
        self.outside = self._place("outside", f"{four}.1", f"{six}:1", "eth0", elsewhere)
        self.ip(
            self.node,
            "link set lo up",
            f"link add eth0 type veth peer name eth0 netns {self.outside.namespace}",
            f"addr add {self.node.v4}/24 dev eth0",
            f"addr add {self.node.v6}/64 dev eth0 nodad",
            "link set eth0 up",
        )
        self.ip(
            self.outside,
            "link set lo up",
            f"addr add {self.outside.v4}/24 dev eth0",
            f"addr add {self.outside.v6}/64 dev eth0 nodad",
            "link set eth0 up",
            f"route add default via {self.node.v4}",
            f"route add default via {self.node.v6}",
        )
        self.ip(
            self.node,
            f"route add default via {self.outside.v4}",
            f"route add default via {self.outside.v6}",
        )

    def _place(self, name: str, v4: str, v6: str, device: str, parent: Path | None = None) -> Pod:
        """A network namespace and a cgroup (below the node's, or `parent`), without any address yet."""
        namespace, cgroup = f"{self.identity}-{name}", (parent or self.cgroup) / name
        netns.create(namespace)
        cgroup.mkdir()
        with netns.entered(netns.path(namespace)):
            for key, value in _SYSCTLS.items():
                (Path("/proc/sys") / key).write_text(value)
        place = Pod(name, namespace, cgroup, v4, v6, device)
        self._places.append(place)
        return place

    def _connect(self, pod: Pod) -> None:
        """As the CNI plugin ptp does: no bridge; the node's end has the gateway's address, and a route."""
        four, six = f"10.244.{self.number}.1", f"fd00:10:244:{self.number}::1"
        self.ip(
            self.node,
            f"link add {pod.device} type veth peer name eth0 netns {pod.namespace}",
            f"addr add {four}/32 dev {pod.device}",
            f"addr add {six}/128 dev {pod.device} nodad",
            f"link set {pod.device} up",
            f"route add {pod.v4}/32 dev {pod.device} src {four}",
            f"route add {pod.v6}/128 dev {pod.device}",
        )
        self.ip(
            pod,
            "link set lo up",
            f"addr add {pod.v4}/32 dev eth0",
            f"addr add {pod.v6}/128 dev eth0 nodad",
            "link set eth0 up",
            f"route add {four}/32 dev eth0 scope link",
            f"route add {six}/128 dev eth0",
            f"route add default via {four}",
            f"route add default via {six}",
        )

    def _heed_signals(self) -> None:
        """Where nobody else does, let SIGTERM and a closed terminal unwind the stack as Ctrl-C does."""
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
        if os.getpid() != self._owner:
            return
        leftovers.remove(self.identity)
        for place in self._places:
            place.reap()


def _exit_by_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _command(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"{' '.join(arguments)}: {done.stderr.strip()}")
