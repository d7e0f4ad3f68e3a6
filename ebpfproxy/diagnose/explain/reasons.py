"""The reasons that `explain` gives, besides those that are recorded where something is decided.

`explain --reasons` lists all.
"""

from ebpfproxy.api.event import Unserved
from ebpfproxy.plan.endpoint_reasons import EndpointReason
from ebpfproxy.plan.protected_addresses import Protected
from ebpfproxy.plan.reason import AnyReason


class Reason(AnyReason):
    """The reasons of steps in the order of their subjects."""

    NO_NODE_OBJECT = (
        "node: no Node object has this name, so zone and pod networks are unknown (--assume-node)"
    )

    IS_NODE = "client: a process in the network namespace of the node"
    POD_BY_DEVICE = "client: a pod of this node, by its network namespace or device"
    POD_BY_NETWORK = "client: a pod: its address is in the network of pods (--detect-local-mode)"
    POD_BY_INTERFACE = "client: a pod: its packets arrive at an interface of pods (--detect-local-mode)"
    NOT_DETECTED_AS_POD = (
        "client: a pod, but neither its address nor its interface is that of pods (--detect-local-mode)"
    )
    NO_DETECTION = (
        "client: local traffic cannot be detected, so all clients except the node are treated alike"
    )
    IS_OUTSIDE = "client: neither this node nor one of its pods"

    CONNECT_HOOK = "path: the connect() hook of the cgroup rewrites the socket's address"
    SENDMSG_HOOK = "path: the connect() or sendmsg() hook rewrites the address of a UDP socket"
    INGRESS_OF_POD = "path: the ingress program at the pod's device translates packets"
    INGRESS_OF_UPLINK = "path: the ingress program at an uplink or tunnel translates packets"
    EGRESS_OF_DEVICE = "path: the egress program at the device that the node's packet leaves by translates it"
    ROUTE_OF_FRONTEND = (
        "path: a route of the agent leads packets for the on-link address to the egress program of the uplink"
    )
    RANGES_NEED_PACKETS = (
        "path: source ranges apply, and a socket may have no source address yet: the packet path decides"
    )
    SCTP_NEEDS_PACKETS = "path: SCTP sockets run no hook: the packet path decides"
    SOCKET_LB_OFF = "path: --socket-lb excludes this client's sockets"
    POD_BYPASSES_HOOKS = "path: the node does not see this pod's sockets, for example of a VM"
    NAMESPACE_NEEDS_PACKETS = (
        "path: the network namespace is not known to be that of a pod whose packets all take one way"
    )
    NO_DEVICE_PASSED = (
        "path: the node's packets to itself pass no device with a program, so nothing translates them"
    )
    NAT_PREROUTING = "path: the rules at prerouting translate packets that arrive"
    NAT_OUTPUT = "path: the rules at output translate packets of the node itself"
    FLOWTABLE = (
        "path: if the kernel has flowtables, one forwards the packets of the flow once it is established"
    )
    VIRTUAL_SERVER = "path: the node has the address, and IPVS takes packets at input"
    RELAY = (
        "path: the node has the address, and a relay accepts the connection and opens another one to the "
        "endpoint"
    )

    CLUSTER_IP = "frontend: the address is a ClusterIP of the Service"
    EXTERNAL_IP = "frontend: the address is in externalIPs of the Service"
    LOAD_BALANCER_IP = "frontend: the address is in status.loadBalancer of the Service"
    NODE_PORT = "frontend: the port is a NodePort, and this address of the node accepts those"
    WON_CLAIM = "frontend: several Services claim the frontend; the kind, then the name decides"
    NODE_PORT_INSTEAD = (
        "frontend: the frontend of this address has no endpoint, and the NodePort with the same number is "
        "used"
    )
    PORT_NOT_SERVED = "frontend: a Service has the address, but no port with this number and protocol"
    SCTP_UNSERVED = (
        "frontend: the agent does not serve the SCTP port, because this mode or kernel cannot forward it"
    )
    UNUSED_PORT_REJECTED = "frontend: this mode rejects ports of a ClusterIP that its Service does not have"
    UNUSED_PORT_ON_NODE = (
        "frontend: modes ipvs and userspace: the node has the address, and rejects ports that no Service has"
    )
    UNALLOCATED_CLUSTER_IP = (
        "frontend: the address belongs to a ServiceCIDR, but no Service that this agent serves has it"
    )
    ADDRESS_EXCLUDED = "frontend: the port is a NodePort, but --nodeport-addresses excludes this address"
    LOOPBACK_EXCLUDED = (
        "frontend: the port is a NodePort, but NodePorts do not answer on loopback in this mode or by a flag"
    )
    OTHER_LOOPBACK = "frontend: the loopback address is the client's own, not that of the node"
    NOT_THIS_NODE = "frontend: the port is a NodePort, but the address is not of this node"
    HEALTH_CHECK_NODE_PORT = "frontend: the agent answers health checks of a load balancer at this port"
    ENDPOINT_ADDRESS = "frontend: the address is that of an endpoint: the connection uses no Service"
    INVALID_OBJECT = "frontend: the object of the Service cannot be served"
    REJECTED_PART = "frontend: parts of the Service's objects cannot be served; the rest is"
    NO_PORT = "frontend: the Service has no such port, or no ClusterIP of a family"
    LOST_CLAIM = "frontend: another Service has this frontend"
    ECHO_REQUEST = "frontend: an echo request (ping) has no port, and reaches no endpoint"
    NO_FRONTEND = "frontend: no Service has this address and port"

    UNRESTRICTED = "source ranges: no source ranges apply to this frontend"
    IN_RANGES = "source ranges: loadBalancerSourceRanges contains the client"
    NODE_IN_RANGES = "source ranges: loadBalancerSourceRanges contains an address of the node"
    NOT_IN_RANGES = (
        "source ranges: loadBalancerSourceRanges does not contain the client: its packets are dropped"
    )
    RANGES_UNKNOWN_CLIENT = (
        "source ranges: the client has no known address, so it is treated as if it were in no range"
    )
    RANGES_WITHOUT_ENDPOINTS = (
        "source ranges: modes iptables and userspace: without any endpoint source ranges do not apply"
    )

    INTERNAL_CLUSTER = "policy: internalTrafficPolicy Cluster: endpoints on all nodes"
    INTERNAL_LOCAL = "policy: internalTrafficPolicy Local: endpoints on this node only"
    EXTERNAL_CLUSTER = "policy: externalTrafficPolicy Cluster: endpoints on all nodes"
    EXTERNAL_LOCAL = "policy: externalTrafficPolicy Local and a client outside: endpoints on this node only"
    EXTERNAL_LOCAL_INSIDE = (
        "policy: externalTrafficPolicy Local, but the client is a pod or the node: endpoints on all nodes"
    )
    IPVS_ONE_LIST = (
        "policy: mode ipvs has one list for all clients: policy Local applies to pods and the node, too"
    )

    PORT_MISSING = "endpoints: excluded: its EndpointSlice has no port with this name and protocol"
    OTHER_FAMILY = "endpoints: excluded: it has an address of the other family"
    ONE_LIST_EXCLUDED = (
        "endpoints: excluded: mode ipvs has one list for all clients, with only those on this node"
    )
    HAIRPIN_LOST = (
        "endpoints: unusable: mode ipvs does not masquerade a pod that reaches itself if its node is not "
        "named"
    )
    NODE_IN_TUNNEL = (
        "endpoints: unusable: mode ipvs does not serve the node itself at addresses whose packets use a "
        "tunnel"
    )
    HAS_ADDRESS_ITSELF = (
        "endpoints: excluded: the client is an endpoint with direct routing or a tunnel, and reaches itself"
    )
    LISTED = "endpoints: used: in the kernel's list for this client"
    NOT_LISTED = (
        "endpoints: excluded: not in the kernel's list for this client; it drains, or the policy excludes it"
    )
    NO_ENDPOINTS = "endpoints: the Service has no usable endpoint on any node"
    NONE_BY_POLICY = "endpoints: there are usable endpoints, but none on this node"
    LAST_ENDPOINTS_KEPT = (
        "endpoints: default/kubernetes keeps its last endpoints while the API server lists none"
    )

    NO_AFFINITY = "affinity: sessionAffinity is None"
    AFFINITY_BY_NETNS = (
        "affinity: ClientIP; the network namespace identifies the node, and a pod with several addresses "
        "of the family"
    )
    AFFINITY_BY_ADDRESS = "affinity: ClientIP; the source address identifies the client"
    AFFINITY_KNOWN = "affinity: the client has an endpoint by affinity, which it gets again"
    AFFINITY_UNKNOWN = "affinity: the client has no endpoint by affinity yet"

    RANDOM = "algorithm: each usable endpoint has the same probability"
    RANDOM_BY_WEIGHT = "algorithm: the probability of each usable endpoint is in proportion to its weight"
    ALGORITHM = "algorithm: the annotation lb-algorithm or the flag --lb-algorithm selects the algorithm"
    BALANCING_IGNORED = "algorithm: this mode does not honor a part of the requested load balancing"
    SCHEDULER = "algorithm: mode ipvs: the scheduler selects"
    RELAY_SELECTS = "algorithm: the relay selects them in turn (round robin)"
    SINGLE = "algorithm: there is only one usable endpoint"

    RESET_IF_REMOVED = (
        "endpoints: if one is removed, its connections are reset after --removed-endpoints-grace"
    )

    RESET_IF_ADDED = (
        "endpoints: if one is added, connections of others may be reset, so that it gets its share"
    )

    DIRECT_ROUTING = (
        "forwarding: mode ipvs: packets go to the endpoint's MAC address, and it replies to the client itself"
    )
    TUNNEL = (
        "forwarding: mode ipvs: packets go to the endpoint in an IP tunnel, and it replies to the client "
        "itself"
    )
    DIRECT_RETURN = (
        "forwarding: mode ebpf: packets go in tunnels to the nodes of endpoints, which reply to the client "
        "themselves"
    )
    FORWARDING_LIMITED = (
        "forwarding: mode ipvs: packets are translated, because the requested forwarding is not possible"
    )

    POLICY_MASQUERADES = (
        "masquerade: masqueraded: the reply of an endpoint might not return through this node"
    )
    MASQUERADE_ALL = "masquerade: masqueraded: --masquerade-all"
    HAIRPIN = "masquerade: masqueraded: the endpoint is the client itself"
    RELAY_IS_CLIENT = "masquerade: the relay is the client of the endpoint, so the endpoint sees the node"
    POLICY_KEEPS = "masquerade: not masqueraded: the traffic policy keeps the client's address"
    SOCKET_IS_REWRITTEN = "masquerade: not masqueraded: the socket connects to the endpoint itself"
    REPLY_PASSES_NODE = (
        "masquerade: not masqueraded: the endpoint is on this node, so its reply passes the node anyway"
    )
    KEEPS_ADDRESSES = (
        "masquerade: not masqueraded: with direct routing and tunnels the endpoint replies to the client "
        "itself"
    )
    ENDPOINT_IS_NODE = (
        "masquerade: not masqueraded: the endpoint has an address of this node, so the packet leaves by no "
        "device"
    )
    NO_PROGRAM_AT_DEVICE = "masquerade: not masqueraded: the device that leads to the endpoint has no program"

    SEES_CLIENT = "addresses: the server sees the client's own address"
    SEES_NODE = "addresses: the server sees an address of this node"
    PEER_IS_FRONTEND = "addresses: the client sees the frontend address as its peer"

    FORWARD_DROPS = "firewall: rules of another program drop or may drop packets"

    AGREES = "kernel: the kernel has the desired state of this ServicePort"
    DISAGREES = "kernel: the kernel differs from the desired state of this ServicePort"

    CONNECTS = "outcome: the connection reaches one of the usable endpoints"
    REJECTED_NO_ENDPOINTS = "outcome: the connection is rejected: no node has a usable endpoint"
    SCTP_NOT_RELAYED = "outcome: the connection is rejected: mode userspace relays TCP and UDP only"
    LOOPBACK_NOT_RELAYED = "outcome: mode nftables rejects UDP and SCTP at loopback, as kube-proxy does"
    DROPPED_BY_POLICY = "outcome: packets are dropped: only the traffic policy excludes the endpoints"
    DROPPED_BY_RANGES = "outcome: packets are dropped: source ranges exclude the client"
    DROPPED_IN_TUNNEL = (
        "outcome: packets are dropped: host-originated ones have the address of the Service as their source"
    )
    REJECTED_UNUSED_PORT = "outcome: the connection is rejected: no Service has the port"
    REJECTED_UNALLOCATED = "outcome: the connection is rejected: no Service has the address"
    DROPPED_UNALLOCATED = "outcome: mode nftables drops packets to unallocated ClusterIPs, as kube-proxy does"
    REJECTED_OR_DROPPED = (
        "outcome: mode iptables: rejected or dropped, depending on which of two rules is first"
    )
    NODE_PORT_DROPPED = (
        "outcome: mode iptables: policy Local drops packets to the NodePort at each address of the node"
    )
    NODE_PORT_REJECTED = (
        "outcome: mode iptables: without endpoints the NodePort is rejected at each address of the node"
    )
    REACHES_NODE = (
        "outcome: no Service: a process of the node that listens there answers, otherwise it is refused"
    )
    ROUTED = "outcome: no Service: the packet is routed like any other"
    EXTERNAL_NOT_REJECTED = (
        "outcome: mode iptables: no rule rejects the node's packets to an external address: they are routed"
    )
    ECHO_ANSWERED = "outcome: the node answers the echo request"
    ECHO_NOT_ANSWERED = "outcome: nothing answers the echo request"
    HEALTH_CHECK_ANSWERED = "outcome: the agent answers: 200 if this node has a ready endpoint, else 503"
    NO_SERVICE = "outcome: no service proxy serves the Service"


_ALL = (*EndpointReason, *Unserved, *Protected, *Reason)
BY_SUBJECT = {
    subject: [each for each in _ALL if each.subject == subject]
    for subject in dict.fromkeys(each.subject for each in Reason)
}
"""All reasons, by subject in the order of steps."""
