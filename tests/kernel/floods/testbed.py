"""One node: an external client floods its NodePorts, and attacks its connections with spoofed packets.

Three pods serve. The third one counts as a pod of another node, so its clients are masqueraded in every mode.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.lab import Lab, Pod
from ebpfproxy.model.address import Protocol
from tests.kernel.cluster import (
    SERVICE_NETWORKS,
    TCP_TARGET,
    UDP_TARGET,
    Cluster,
    Exposed,
    PodEndpoint,
    elsewhere,
)
from tests.kernel.floods import endpoints
from tests.support.flood import NETWORKS

LAB_NUMBER = 91
FLOWS_MAX = 8_192
"""Entries for flows in the short form: fewer than its floods have packets."""
SHORT = 40_000
"""Packets of a flood in the short form."""

_AT_ONCE = "--iptables-min-sync-period=0s"
MODES: Mapping[str, tuple[str, ...]] = {
    "ebpf": (),
    "nftables": (_AT_ONCE,),
    "iptables": (_AT_ONCE, "--iptables-backend=legacy"),
    "ipvs": ("--iptables-backend=legacy",),
}
"""By mode: flags of the agent."""

both_families = pytest.mark.parametrize("family", ["v4", "v6"])


class Target(Cluster):
    """As `Cluster`. The clients of a flood are not reachable: packets to them are dropped silently."""

    def __init__(self, lab: Lab, mode: str) -> None:
        super().__init__(lab, mode)
        lab.ip(lab.outside, *(f"route add blackhole {network}" for network in NETWORKS.values()))

    def route(self) -> None:
        """The external client reaches the addresses of Services. Untranslated packets that the node sends
        back are dropped."""
        for network in SERVICE_NETWORKS:
            self.lab.ip(self.lab.outside, f"route add blackhole {network} table 100")
            family = "-6" if ":" in network else "-4"
            rule = ["rule", "add", "iif", "eth0", "to", network, "lookup", "100"]
            self.lab.outside.run(["ip", family, *rule])

    @staticmethod
    def serve(pod: Pod) -> None:
        endpoints.serve_streams(pod, TCP_TARGET)
        pod.serve(Protocol.UDP, UDP_TARGET, lambda client, port: f"{pod.name} {client} {port}")

    @property
    def backends(self) -> tuple[PodEndpoint, ...]:
        return PodEndpoint(self.a), PodEndpoint(self.b), elsewhere(self.c)

    def has_room_for(self, flows: int) -> bool:
        """Whether a new client connects while so many flows are half open or unreplied. Modes other than ebpf
        have nf_conntrack_max entries for all flows. Only the initial namespace can write this limit. A full
        table drops the first packet of a flow unless it finds one in a few buckets which it may evict
        (early_drop() of nf_conntrack_core.c), as with kube-proxy."""
        if self.mode == "ebpf":
            return True
        return flows < int(Path("/proc/sys/net/netfilter/nf_conntrack_max").read_text())

    def counters(self) -> str:
        """What the stacks of node, client and pods counted, and the agent: for the report of a failure."""
        places = self.node, self.lab.outside, self.a, self.b, self.c
        counted = [f"{each}: {each.run(['nstat', '-as']).stdout}" for each in places]
        return "\n".join([*counted, self.http_get("metrics")])

    def node_port(self, **spec: Any) -> Exposed:
        """A Service with a NodePort and all three endpoints."""
        return self.service(node_port=True, **spec).to(*self.backends)


def in_modes(
    *, ebpf_lacks: str = "", ipvs_lacks: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of `target` in every mode. `ebpf_lacks`, `ipvs_lacks`: why it fails in this mode; "" if it
    passes."""
    lacks = {"ebpf": ebpf_lacks, "ipvs": ipvs_lacks}
    modes = [
        pytest.param(mode, marks=[pytest.mark.xfail(strict=False, reason=lacks[mode])])
        if lacks.get(mode)
        else pytest.param(mode)
        for mode in MODES
    ]
    return pytest.mark.parametrize("target", modes, indirect=True, scope="session")
