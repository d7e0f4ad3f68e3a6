"""Local traffic detection: how packets of pods are recognized (--detect-local-mode).

The modes are those of pkg/proxy/util/localdetector.go, and `DetectLocal.DEVICES`.
"""

from collections.abc import Iterable

from ebpfproxy.model.address import Family, Network, family, network_family
from ebpfproxy.model.node import Node
from ebpfproxy.plan.node_ports import host_ips
from ebpfproxy.plan.service_plan import DetectLocal, LocalTraffic, PlanContext


def has_detector(context: PlanContext, ip_family: Family, node: Node | None) -> bool:
    """Return whether packets of pods can be recognized in this family."""
    return context.detect_local is DetectLocal.DEVICES or local_traffic(context, ip_family, node) is not None


def local_traffic(context: PlanContext, ip_family: Family, node: Node | None) -> LocalTraffic | None:
    """Return what identifies the packets of pods in this family, None if nothing does.

    None means: the option has no CIDR of this family or no device name, or the Node is unknown or has no
    podCIDRs yet. The result is also None with `DetectLocal.DEVICES`, which identifies pods by device role.
    """
    match context.detect_local:
        case DetectLocal.CLUSTER_CIDR:
            return _first(context.cluster_cidrs, ip_family)
        case DetectLocal.NODE_CIDR:
            return _first(node.pod_cidrs if node else (), ip_family)
        case DetectLocal.BRIDGE_INTERFACE | DetectLocal.INTERFACE_NAME_PREFIX as mode:
            is_prefix = mode is DetectLocal.INTERFACE_NAME_PREFIX
            name = context.pod_interface
            return LocalTraffic(interface=name, prefix=is_prefix) if name else None
        case DetectLocal.DEVICES:
            return None


def families_without_detector(context: PlanContext, node: Node | None) -> frozenset[Family]:
    """Return the families in which the Node has an address, but local traffic cannot be detected.

    Empty if the Node is unknown.
    """
    if node is None:
        return frozenset()
    families = map(family, host_ips(node, context))
    return frozenset(each for each in families if not has_detector(context, each, node))


def _first(cidrs: Iterable[Network], ip_family: Family) -> LocalTraffic | None:
    network = next((cidr for cidr in cidrs if network_family(cidr) is ip_family), None)
    return LocalTraffic(network) if network else None
