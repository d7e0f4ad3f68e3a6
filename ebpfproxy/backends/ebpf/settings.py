"""The settings of the eBPF backend."""

import dataclasses
from pathlib import Path

from ebpfproxy.backends.connection_resets import Pace
from ebpfproxy.backends.ebpf.flows.state import FlowTimeouts
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.linux.bpf.xdp import Mode
from ebpfproxy.plan.service_plan import SocketLb


@dataclasses.dataclass(frozen=True, slots=True)
class EbpfSettings:
    """Paths and options.

    - `cgroup_root`: the hooks apply to the sockets of all processes below it.
    - `devices`: whether to manage network devices. If not, another agent may manage those of this network
      namespace. This agent then removes only what a previous run of its own left at them.
    - `destroy_stale_sockets`: whether to destroy connected UDP sockets whose endpoint is gone and which could
      not be reconnected.
    - `dsr_port`: the UDP port of tunneled packets (direct server return), 0 to neither send nor accept any.
      `devices` must be set for another value.
    - `resets`: when connections to removed endpoints are reset.
    - `redirect`: flows to another node's endpoint skip this node's stack if the kernel supports that.
    - `xdp`: the mode of the XDP program at uplinks, None for none. It has an effect only with `redirect`.
    """

    cgroup_root: Path
    bpffs_root: Path
    proc_root: Path = Path("/proc")
    sizes: MapSizes = dataclasses.field(default_factory=MapSizes)
    socket_lb: SocketLb = SocketLb.ON
    timeouts: FlowTimeouts = dataclasses.field(default_factory=FlowTimeouts)
    redirect: bool = False
    xdp: Mode | None = None
    devices: bool = True
    destroy_stale_sockets: bool = False
    dsr_port: int = 0
    resets: Pace = dataclasses.field(default_factory=Pace)

    @property
    def tunnels(self) -> bool:
        """Whether this node has direct server return."""
        return self.devices and self.dsr_port > 0

    def map_sizes(self) -> MapSizes:
        """`sizes`, without room for direct server return if this node has none."""
        return self.sizes if self.tunnels else dataclasses.replace(self.sizes, tunneled_flows=1, tunnels=1)
