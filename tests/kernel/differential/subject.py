"""A lab whose first node one mode serves, without an agent: the backend runs in this process."""

import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.backends.interface import Callbacks, Inspection, Mode
from ebpfproxy.config import Config
from ebpfproxy.lab import Lab, Netns, Pod, PodNetwork
from ebpfproxy.linux.netlink import links, local_addresses
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import parse_network
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.namespace import Namespace
from tests.kernel.cluster import SERVICE_CIDRS, SERVICE_NETWORKS
from tests.kernel.differential.dialers import DIRECT_LAPS, RELAYED_LAPS, Dialer, Fence, serve
from tests.kernel.differential.history import Change, fence_service
from tests.kernel.differential.impatience import try_again_soon
from tests.kernel.differential.places import (
    CLIENTS,
    FENCE_IPS,
    FENCE_PORTS,
    NUMBER,
    REMEMBERED,
    SERVERS,
    TARGET_PORTS,
    UDP,
    Server,
)

T = TypeVar("T")

_ICMP_UNLIMITED = {
    "net/ipv4/icmp_ratemask": "0",
    "net/ipv4/icmp_ratelimit": "0",
    "net/ipv6/icmp/ratelimit": "0",
    "net/ipv6/icmp/ratemask": "128",
}
"""Without these, only a few ICMP rejections are sent per second. The last value leaves
only ICMPv6 type 128 limited, the echo request."""

_TIMEOUTS = {
    f"net/netfilter/nf_conntrack_{key}": str(REMEMBERED) for key in ("udp_timeout", "udp_timeout_stream")
}
"""`udp_timeout` applies to flows with one exchange. Entries of unanswered TCP connections expire earlier."""


class Subject:
    """A lab and a backend, within a `with` block.

    One thread in the node's network namespace opens the backend and applies states to it.
    """

    def __init__(self, name: str, mode: Mode, texts: Mapping[str, Any], processor: int) -> None:
        """`texts`: configuration values, in addition to those for the lab. `processor`: the one for all
        packets of the lab, see `dialers`."""
        self.name = name
        self._processor = processor
        self._mode = mode
        self._texts = texts
        self._lab = Lab(f"diff-{name}", NUMBER, PodNetwork.ROUTED)
        self._bypassing: set[int] = set()
        self._namespaces: tuple[Namespace, ...] = ()
        self.state = ClusterState({}, {})

    @property
    def mode(self) -> str:
        """The name of the mode."""
        return self._mode.name

    @property
    def config(self) -> Config:
        """The configuration of the backend."""
        return self._config

    def inspect(self) -> Inspection[Any, Any]:
        """Open the mode's state in the kernel to read it. Call it in the node's network namespace."""
        return self._mode.inspect(self._config)

    def __enter__(self) -> "Subject":
        self._lab.__enter__()
        try:
            self._start_servers_and_clients()
            self._control = concurrent.futures.ThreadPoolExecutor(
                1, f"control-{self.name}", initializer=_enter, initargs=(self._lab.node,)
            )
            self._control.submit(self._open).result()
        except BaseException:
            self._lab.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._control.submit(self._serving.close).result()
            self._control.shutdown()
        finally:
            self._lab.__exit__(kind, error, trace)

    def submit(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run it in the control thread."""
        return self._control.submit(function)

    def verify(self) -> concurrent.futures.Future[SyncResult]:
        """Read the kernel state back, and repair differences."""
        return self._control.submit(self._serving.sync, True)

    def _start_servers_and_clients(self) -> None:
        """Start servers and clients. The router drops untranslated packets to Service addresses."""
        lab = self._lab
        for gateway, network in zip((lab.node.v4, lab.node.v6), SERVICE_NETWORKS, strict=True):
            lab.ip(
                lab.router,
                f"route add blackhole {network}",
                f"route add {network} via {gateway} table 100",
            )
            family = "-6" if ":" in network else "-4"
            lab.router.run(["ip", family, "rule", "add", "iif", "outside", "to", network, "lookup", "100"])
        try_again_soon(lab.cgroup.parent)
        namespaces = [self._netns_of(server) for server in SERVERS]
        for ns in (*namespaces, lab.outside):
            ns.call(lambda: _set(_ICMP_UNLIMITED))
        lab.node.call(lambda: _set(_TIMEOUTS))
        for server, ns in zip(SERVERS, namespaces, strict=True):
            own = server.at if server.host else ("::",)
            serve(ns, server.name, own, TARGET_PORTS, self._processor)
        clients = {"pod": namespaces[0], "node": lab.node, "outside": lab.outside}
        for source, ns in clients.items():
            assert (ns.v4, ns.v6) == CLIENTS[source]
        self.dialers = {source: Dialer(ns, self._fence(), self._processor) for source, ns in clients.items()}

    def _fence(self) -> Fence:
        """A relay process does not keep the order of packets to itself and of others: the fence leads through
        the relay, too."""
        if self._is_relayed:
            return Fence(tuple(itertools.product(FENCE_IPS, FENCE_PORTS.values())), RELAYED_LAPS)
        at = [(address, port) for server in SERVERS for address in server.at for port in TARGET_PORTS[UDP]]
        return Fence(tuple(at), DIRECT_LAPS)

    @property
    def _is_relayed(self) -> bool:
        return self.mode == "userspace"

    def _netns_of(self, server: Server) -> Pod:
        node = next(node for node in self._lab.nodes if node.name == server.node)
        ns = node.host if server.host else node.pod(server.name)
        assert (ns.v4, ns.v6) == server.at
        return ns

    # In the control thread:

    def _open(self) -> None:
        lab = self._lab
        self._config = Config.parse(
            {
                "hostname_override": lab.node_name,
                "cgroup_root": str(lab.cgroup),
                "bpffs_root": str(lab.bpffs),
                "detect_local_mode": "InterfaceNamePrefix",
                "pod_interface_name_prefix": "veth",
                "conntrack_udp_timeout": f"{REMEMBERED}s",
                "conntrack_udp_timeout_stream": f"{REMEMBERED}s",
                **self._texts,
            }
        )
        callbacks = Callbacks(pods_bypass=self._bypassing.update, namespaces=self._see)
        self._serving = ActiveMode(self._mode, self._config, callbacks)
        others = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._processor})  # relays inherit it
        try:
            self._serving.open()
        finally:
            os.sched_setaffinity(0, others)
        self._networks, self._devices = local_addresses.read(), links.read()

    def _see(self, namespaces: tuple[Namespace, ...]) -> None:
        self._namespaces = namespaces

    def apply(self, change: Change) -> None:
        """Apply the change completely; `state` is then the complete state. Raises KernelError."""
        state = dataclasses.replace(
            change.state,
            local_networks=self._networks,
            devices=self._devices,
            bypassing=frozenset(self._bypassing),
            namespaces=self._namespaces,
            service_cidrs=frozenset(map(parse_network, SERVICE_CIDRS)),
        )
        services = change.services
        if self._is_relayed:
            fence, slices = fence_service()
            state = dataclasses.replace(
                state,
                services={**state.services, fence.name: fence},
                slices={**state.slices, fence.name: slices},
            )
            services |= {fence.name}
        self._serving.reconciler.plan(state, services, node_changed=change.node_changed, host_changed=True)
        done = self._serving.sync(verify=False)
        assert not done.rejected, done
        self.state = state


def _enter(ns: Netns) -> None:
    namespace = os.open(ns.netns, os.O_RDONLY | os.O_CLOEXEC)
    netns.enter(namespace)
    os.close(namespace)


def _set(settings: Mapping[str, str]) -> None:
    for key, value in settings.items():
        with open(f"/proc/sys/{key}", "w") as setting:
            setting.write(value)
