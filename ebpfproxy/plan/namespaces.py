"""Network namespaces: which of them are pods of this node, and whose sockets the socket path serves.

The socket path connects a socket to an endpoint. That is only right if the endpoint is reachable from the
socket's namespace as the frontend is. Without these facts, the packet path serves the namespace, which is
right for everybody.
"""

from ebpfproxy.model.address import Address, Family, contains, family
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.namespace import Link, Namespace, NamespaceClass
from ebpfproxy.plan.service_plan import PlanContext, SocketLb

SOCKET_LB = "ebpfproxy/socket-lb: off"


def classify(namespace: Namespace, state: ClusterState) -> tuple[NamespaceClass, str]:
    """Return the class of a namespace that is not the node's, and the reason.

    The namespaces of another cluster in a pod, or in a container of this machine, are linked with the
    namespace of that pod or container. They may have the same addresses and cgroups of the same names.
    """
    if namespace.link is Link.ELSEWHERE:
        return NamespaceClass.OTHER, "a device leads to another network namespace than the node's"
    has_address = namespace.link is Link.NODE and any(
        contains(network, address)
        for network in (state.node.pod_cidrs if state.node else ())
        for address in namespace.addresses
    )
    if not namespace.pod and not has_address:
        return NamespaceClass.OTHER, "neither in a pod's cgroup nor with an address of the Node's podCIDRs"
    identity = f"cgroup of pod {namespace.pod}" if namespace.pod else "address of the Node's podCIDRs"
    if owner := opted_out_by(namespace, state):
        return NamespaceClass.PACKET_PATH, f"{identity}; {owner} has the annotation {SOCKET_LB}"
    if len(namespace.up) != 1:
        return NamespaceClass.PACKET_PATH, f"{identity}; {len(namespace.up)} devices are up, not 1"
    if namespace.special:
        return NamespaceClass.PACKET_PATH, f"{identity}; {', '.join(namespace.special)}"
    return NamespaceClass.SOCKET_PATH, f"{identity}; only {namespace.up[0]} is up, without rules of its own"


def is_of_pod(namespace: Namespace, state: ClusterState) -> bool:
    """Return whether the namespace is that of a pod of this node."""
    return classify(namespace, state)[0] is not NamespaceClass.OTHER


def opted_out_by(namespace: Namespace, state: ClusterState) -> str:
    """Return whose annotation excludes the network namespace from the socket path; "" if there is none."""
    for pod in state.opted_out:
        if namespace.pod == pod.uid != "" or not namespace.addresses.isdisjoint(pod.addresses):
            return "the pod" if pod.socket_lb is False else f"the Namespace {pod.name.namespace}"
    return ""


def source(namespace: Namespace, ip_family: Family) -> Address | None:
    """Return the source of the namespace's packets to Services. None if several addresses may be, or none."""
    found = [each for each in namespace.addresses if family(each) is ip_family]
    return found[0] if len(found) == 1 else None


def by_socket(state: ClusterState, context: PlanContext) -> tuple[Namespace, ...]:
    """Return the pods' namespaces whose sockets the socket path serves."""
    if context.socket_lb is not SocketLb.ON:
        return ()
    return tuple(each for each in state.namespaces if classify(each, state)[0] is NamespaceClass.SOCKET_PATH)
