"""The part of `Config` that applies to an edge only: `EdgeOptions`."""

# ruff: noqa: RUF009 -- option() makes a dataclasses.field(), which is what a default may be made by

import dataclasses

from ebpfproxy.config import flag_types
from ebpfproxy.config.option import Group, option
from ebpfproxy.model.address import Network
from ebpfproxy.plan.service_plan import Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeOptions:
    """Options of role edge, and the role itself."""

    role: Role = option(
        "--role", flag_types.ROLE, "node", Group.CLUSTER,
        "What this machine is (ebpfproxy only). node: a node of the cluster. edge: a machine outside the "
        "cluster, without kubelet, that forwards connections to external and load balancer IPs to nodes, in "
        "mode ebpf.",
    )  # fmt: skip
    edge_vip_cidrs: tuple[Network, ...] = option(
        "--edge-vip-cidrs", flag_types.NETWORKS, "", Group.EDGE,
        "Serve and announce only external and load balancer IPs in these networks. May be repeated. Empty: "
        "all, also those that users write into externalIPs.",
    )  # fmt: skip
    edge_check_interval: float = option(
        "--edge-check-interval", flag_types.duration(zero=False), "1s", Group.EDGE,
        "Interval at which the health of each node that has endpoints is checked. A node is down after 3 "
        "failed checks, and up after a successful one. Must be more than 0.",
    )  # fmt: skip
    edge_drain_seconds: int = option(
        "--edge-drain-seconds", flag_types.integer(0, 86400), "30", Group.EDGE,
        "Time between SIGTERM, when all addresses are withdrawn, and the end of the agent. A second SIGTERM "
        "ends it at once. 0: end at once, and keep the addresses announced.",
    )  # fmt: skip
