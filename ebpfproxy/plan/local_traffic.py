"""How a pod's packets are distinguished from others': --detect-local-mode
(pkg/proxy/util/localdetector.go)."""

from collections.abc import Iterable

from ebpfproxy.model.address import Family, Network, family, network_family
from ebpfproxy.model.node import Node
from ebpfproxy.plan.host_ips import host_ips
from ebpfproxy.plan.service_plan import DetectLocal, LocalTraffic, PlanContext


def has_detector(context: PlanContext, of: Family, node: Node | None) -> bool:
    """Whether pods can be distinguished from others at all."""
    return context.detect_local is DetectLocal.DEVICES or local_traffic(context, of, node) is not None


def local_traffic(context: PlanContext, of: Family, node: Node | None) -> LocalTraffic | None:
    """None where detection is impossible: no CIDR of this family, no name of a device, a Node that was not
    seen or has no podCIDRs yet; and with `DetectLocal.DEVICES`, which needs nothing of the kind.
    """
    match context.detect_local:
        case DetectLocal.CLUSTER_CIDR:
            return _first(context.cluster_cidrs, of)
        case DetectLocal.NODE_CIDR:
            return _first(node.pod_cidrs if node else (), of)
        case DetectLocal.BRIDGE_INTERFACE | DetectLocal.INTERFACE_NAME_PREFIX as mode:
            prefix = mode is DetectLocal.INTERFACE_NAME_PREFIX
            name = context.pod_interface
            return LocalTraffic(interface=name, prefix=prefix) if name else None
        case DetectLocal.DEVICES:
            return None


def undetected(context: PlanContext, node: Node | None) -> frozenset[Family]:
    """The families that our Node has an address in, and in which local traffic cannot be detected; none
    without a Node."""
    if node is None:
        return frozenset()
    return frozenset(of for of in map(family, host_ips(node, context)) if not has_detector(context, of, node))


def _first(cidrs: Iterable[Network], of: Family) -> LocalTraffic | None:
    network = next((cidr for cidr in cidrs if network_family(cidr) is of), None)
    return LocalTraffic(network) if network else None
