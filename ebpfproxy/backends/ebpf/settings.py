"""The settings of the eBPF backend."""

import dataclasses
from pathlib import Path

from ebpfproxy.backends.ebpf.flows.state import FlowTimeouts
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.plan.service_plan import SocketLb


@dataclasses.dataclass(frozen=True, slots=True)
class EbpfSettings:
    """Where everything is. `cgroup_root` catches the sockets of all processes below it.

    `devices`: whether there are network devices to look after. Without, none is touched, so that another
    agent may look after those of this network namespace; only what a former run of ours left there goes.

    `destroy_stale_sockets`: connected UDP sockets whose endpoint is gone and which could not be reconnected.

    `redirect`: flows to another node's endpoint skip this node's stack where the kernel can do that.
    """

    cgroup_root: Path
    bpffs_root: Path
    proc_root: Path = Path("/proc")
    sizes: MapSizes = dataclasses.field(default_factory=MapSizes)
    socket_lb: SocketLb = SocketLb.ON
    timeouts: FlowTimeouts = dataclasses.field(default_factory=FlowTimeouts)
    redirect: bool = False
    devices: bool = True
    destroy_stale_sockets: bool = False
