"""Every reason that `explain` gives, defined once. `explain --reasons` lists them."""

import enum


class Subject(enum.Enum):
    """The subject of a step, in the order of the steps."""

    NODE = "node"
    CLIENT = "client"
    PATH = "path"
    FRONTEND = "frontend"
    SOURCE_RANGES = "source ranges"
    POLICY = "policy"
    ENDPOINTS = "endpoints"
    AFFINITY = "affinity"
    ALGORITHM = "algorithm"
    FORWARDING = "forwarding"
    MASQUERADE = "masquerade"
    ADDRESSES = "addresses"
    FIREWALL = "firewall"
    KERNEL = "kernel"
    OUTCOME = "outcome"


class Reason(enum.Enum):
    """A reason: its value is the name in JSON, `meaning` is one line, `subject` is the kind of its step."""

    subject: Subject
    meaning: str

    def __new__(cls, name: str, subject: Subject, meaning: str) -> "Reason":
        made = object.__new__(cls)
        made._value_ = name
        made.subject, made.meaning = subject, meaning
        return made

    # Node
    NO_NODE_OBJECT = (
        "NoNodeObject",
        Subject.NODE,
        "no Node object has this name, so zone and pod networks are unknown (--assume-node)",
    )

    # Client
    IS_NODE = "IsNode", Subject.CLIENT, "a process in the network namespace of the node"
    POD_BY_DEVICE = (
        "PodByDevice",
        Subject.CLIENT,
        "a pod of this node, by its network namespace or device",
    )
    POD_BY_NETWORK = (
        "PodByNetwork",
        Subject.CLIENT,
        "a pod: its address is in the network of pods (--detect-local-mode)",
    )
    POD_BY_INTERFACE = (
        "PodByInterface",
        Subject.CLIENT,
        "a pod: its packets arrive at an interface of pods (--detect-local-mode)",
    )
    NOT_DETECTED_AS_POD = (
        "NotDetectedAsPod",
        Subject.CLIENT,
        "a pod, but neither its address nor its interface is that of pods (--detect-local-mode)",
    )
    NO_DETECTION = (
        "NoDetection",
        Subject.CLIENT,
        "local traffic cannot be detected, so all clients except the node are treated alike",
    )
    IS_OUTSIDE = "IsOutside", Subject.CLIENT, "neither this node nor one of its pods"

    # Path
    CONNECT_HOOK = (
        "ConnectHook",
        Subject.PATH,
        "the connect() hook of the cgroup rewrites the socket's address",
    )
    SENDMSG_HOOK = (
        "SendmsgHook",
        Subject.PATH,
        "the connect() or sendmsg() hook rewrites the address of a UDP socket",
    )
    INGRESS_OF_POD = (
        "IngressOfPod",
        Subject.PATH,
        "the ingress program at the pod's device translates packets",
    )
    INGRESS_OF_UPLINK = (
        "IngressOfUplink",
        Subject.PATH,
        "the ingress program at an uplink or tunnel translates packets",
    )
    EGRESS_OF_DEVICE = (
        "EgressOfDevice",
        Subject.PATH,
        "the egress program at the device that the node's packet leaves by translates it",
    )
    ROUTE_OF_FRONTEND = (
        "RouteOfFrontend",
        Subject.PATH,
        "a route of the agent leads packets for the on-link address to the egress program of the uplink",
    )
    RANGES_NEED_PACKETS = (
        "RangesNeedPackets",
        Subject.PATH,
        "source ranges apply, and a socket may have no source address yet: the packet path decides",
    )
    SCTP_NEEDS_PACKETS = "SctpNeedsPackets", Subject.PATH, "SCTP sockets run no hook: the packet path decides"
    SOCKET_LB_OFF = "SocketLbOff", Subject.PATH, "--socket-lb excludes this client's sockets"
    POD_BYPASSES_HOOKS = (
        "PodBypassesHooks",
        Subject.PATH,
        "the node does not see this pod's sockets, for example of a VM",
    )
    NAMESPACE_NEEDS_PACKETS = (
        "NamespaceNeedsPackets",
        Subject.PATH,
        "the network namespace is not known to be that of a pod whose packets all take one way",
    )
    NO_DEVICE_PASSED = (
        "NoDevicePassed",
        Subject.PATH,
        "the node's packets to itself pass no device with a program, so nothing translates them",
    )
    NAT_PREROUTING = "NatPrerouting", Subject.PATH, "the rules at prerouting translate packets that arrive"
    NAT_OUTPUT = "NatOutput", Subject.PATH, "the rules at output translate packets of the node itself"
    VIRTUAL_SERVER = (
        "VirtualServer",
        Subject.PATH,
        "the node has the address, and IPVS takes packets at input",
    )
    RELAY = (
        "Relay",
        Subject.PATH,
        "the node has the address, and a relay accepts the connection and opens another one to the endpoint",
    )

    # Frontend
    CLUSTER_IP = "ClusterIP", Subject.FRONTEND, "the address is a ClusterIP of the Service"
    EXTERNAL_IP = "ExternalIP", Subject.FRONTEND, "the address is in externalIPs of the Service"
    LOAD_BALANCER_IP = (
        "LoadBalancerIP",
        Subject.FRONTEND,
        "the address is in status.loadBalancer of the Service",
    )
    NODE_PORT = (
        "NodePort",
        Subject.FRONTEND,
        "the port is a NodePort, and this address of the node accepts those",
    )
    WON_CLAIM = (
        "WonClaim",
        Subject.FRONTEND,
        "several Services claim the frontend; the kind, then the name decides",
    )
    NODE_PORT_INSTEAD = (
        "NodePortInstead",
        Subject.FRONTEND,
        "the frontend of this address has no endpoint, and the NodePort with the same number is used",
    )
    PORT_NOT_SERVED = (
        "PortNotServed",
        Subject.FRONTEND,
        "a Service has the address, but no port with this number and protocol",
    )
    SCTP_UNSERVED = (
        "SctpUnserved",
        Subject.FRONTEND,
        "the agent does not serve the SCTP port, because this mode or kernel cannot forward it",
    )
    UNUSED_PORT_REJECTED = (
        "UnusedPortRejected",
        Subject.FRONTEND,
        "mode nftables rejects unused ports of a ClusterIP, as kube-proxy does",
    )
    UNUSED_PORT_ON_NODE = (
        "UnusedPortOnNode",
        Subject.FRONTEND,
        "modes ipvs and userspace: the node has the address, and rejects ports that no Service has",
    )
    UNALLOCATED = (
        "UnallocatedClusterIP",
        Subject.FRONTEND,
        "the address belongs to a ServiceCIDR, but no Service that this agent serves has it",
    )
    ADDRESS_EXCLUDED = (
        "AddressExcluded",
        Subject.FRONTEND,
        "the port is a NodePort, but --nodeport-addresses excludes this address",
    )
    LOOPBACK_EXCLUDED = (
        "LoopbackExcluded",
        Subject.FRONTEND,
        "the port is a NodePort, but NodePorts do not answer on loopback in this mode or by a flag",
    )
    OTHER_LOOPBACK = (
        "OtherLoopback",
        Subject.FRONTEND,
        "the loopback address is the client's own, not that of the node",
    )
    NOT_THIS_NODE = (
        "NotThisNode",
        Subject.FRONTEND,
        "the port is a NodePort, but the address is not of this node",
    )
    HEALTH_CHECK_NODE_PORT = (
        "HealthCheckNodePort",
        Subject.FRONTEND,
        "the agent answers health checks of a load balancer at this port",
    )
    ENDPOINT_ADDRESS = (
        "EndpointAddress",
        Subject.FRONTEND,
        "the address is that of an endpoint: the connection uses no Service",
    )
    INVALID_OBJECT = "InvalidObject", Subject.FRONTEND, "the object of the Service cannot be served"
    REJECTED_PART = (
        "RejectedPart",
        Subject.FRONTEND,
        "parts of the Service's objects cannot be served; the rest is",
    )
    HEADLESS = "Headless", Subject.FRONTEND, "the Service is headless: clients get its endpoints from DNS"
    EXTERNAL_NAME = "ExternalName", Subject.FRONTEND, "the Service is an alias in DNS"
    NO_CLUSTER_IP = "NoClusterIP", Subject.FRONTEND, "the Service has no ClusterIP yet"
    OTHER_PROXY = "OtherProxy", Subject.FRONTEND, "a label assigns the Service to another proxy"
    NO_PORT = "NoPort", Subject.FRONTEND, "the Service has no such port, or no ClusterIP of a family"
    OF_API_SERVER = (
        "OfApiServer",
        Subject.FRONTEND,
        "the address is that of the API server, and no Service gets it (--protected-addresses)",
    )
    OF_HOST_PROCESS = (
        "OfHostProcess",
        Subject.FRONTEND,
        "a program of this node listens there, and no Service gets it (--protected-addresses)",
    )
    OF_LOCAL_SERVER = (
        "OfLocalServer",
        Subject.FRONTEND,
        "a program of this node, such as NodeLocal DNSCache, listens at this ClusterIP",
    )
    OF_OTHER_NODE = (
        "OfOtherNode",
        Subject.FRONTEND,
        "the address is that of another Node, which serves it or not (--protected-addresses)",
    )
    LOST_CLAIM = "LostClaim", Subject.FRONTEND, "another Service has this frontend"
    ECHO_REQUEST = (
        "EchoRequest",
        Subject.FRONTEND,
        "an echo request (ping) has no port, and reaches no endpoint",
    )
    NO_FRONTEND = "NoFrontend", Subject.FRONTEND, "no Service has this address and port"

    # Source ranges
    UNRESTRICTED = "Unrestricted", Subject.SOURCE_RANGES, "no source ranges apply to this frontend"
    IN_RANGES = "InRanges", Subject.SOURCE_RANGES, "loadBalancerSourceRanges contains the client"
    NODE_IN_RANGES = (
        "NodeInRanges",
        Subject.SOURCE_RANGES,
        "loadBalancerSourceRanges contains an address of the node",
    )
    NOT_IN_RANGES = (
        "NotInRanges",
        Subject.SOURCE_RANGES,
        "loadBalancerSourceRanges does not contain the client: its packets are dropped",
    )
    RANGES_UNKNOWN_CLIENT = (
        "RangesUnknownClient",
        Subject.SOURCE_RANGES,
        "the client has no known address, so it is treated as if it were in no range",
    )
    RANGES_WITHOUT_ENDPOINTS = (
        "RangesWithoutEndpoints",
        Subject.SOURCE_RANGES,
        "modes iptables and userspace: without any endpoint source ranges do not apply",
    )

    # Policy
    INTERNAL_CLUSTER = (
        "InternalCluster",
        Subject.POLICY,
        "internalTrafficPolicy Cluster: endpoints on all nodes",
    )
    INTERNAL_LOCAL = (
        "InternalLocal",
        Subject.POLICY,
        "internalTrafficPolicy Local: endpoints on this node only",
    )
    EXTERNAL_CLUSTER = (
        "ExternalCluster",
        Subject.POLICY,
        "externalTrafficPolicy Cluster: endpoints on all nodes",
    )
    EXTERNAL_LOCAL = (
        "ExternalLocal",
        Subject.POLICY,
        "externalTrafficPolicy Local and a client outside: endpoints on this node only",
    )
    EXTERNAL_LOCAL_INSIDE = (
        "ExternalLocalInside",
        Subject.POLICY,
        "externalTrafficPolicy Local, but the client is a pod or the node: endpoints on all nodes",
    )
    IPVS_ONE_LIST = (
        "IpvsOneList",
        Subject.POLICY,
        "mode ipvs has one list for all clients: policy Local applies to pods and the node, too",
    )

    # Endpoints
    READY = "Ready", Subject.ENDPOINTS, "used: ready"
    READY_HINT_NODE = "ReadyHintNode", Subject.ENDPOINTS, "used: ready, and a hint assigns it to this node"
    READY_HINT_ZONE = (
        "ReadyHintZone",
        Subject.ENDPOINTS,
        "used: ready, and a hint assigns it to this node's zone",
    )
    READY_ON_NODE = "ReadyOnNode", Subject.ENDPOINTS, "used: ready, and on this node"
    ONLY_TERMINATING = (
        "OnlyTerminating",
        Subject.ENDPOINTS,
        "used: terminating but serving, and no endpoint is ready",
    )
    ONLY_TERMINATING_ON_NODE = (
        "OnlyTerminatingOnNode",
        Subject.ENDPOINTS,
        "used: terminating but serving, and none on this node is ready",
    )
    NOT_READY = "NotReady", Subject.ENDPOINTS, "excluded: not ready"
    NOT_SERVING = "NotServing", Subject.ENDPOINTS, "excluded: terminating, and no longer serving"
    TERMINATING = "Terminating", Subject.ENDPOINTS, "excluded: terminating, and others are ready"
    HINT_OTHER_NODE = "HintOtherNode", Subject.ENDPOINTS, "excluded: a hint assigns it to another node"
    HINT_OTHER_ZONE = "HintOtherZone", Subject.ENDPOINTS, "excluded: a hint assigns it to another zone"
    NOT_LOCAL = "NotLocal", Subject.ENDPOINTS, "excluded: on another node, and the policy is Local"
    NODE_UNKNOWN = "NodeUnknown", Subject.ENDPOINTS, "excluded: its EndpointSlice names no node"
    POD_OF_HOST_PORT = "PodOfHostPort", Subject.ENDPOINTS, "used: the pod that has this host port"
    NO_WEIGHT = "NoWeight", Subject.ENDPOINTS, "excluded: the annotation endpoint-weights gives it weight 0"
    PORT_MISSING = (
        "PortMissing",
        Subject.ENDPOINTS,
        "excluded: its EndpointSlice has no port with this name and protocol",
    )
    OTHER_FAMILY = "OtherFamily", Subject.ENDPOINTS, "excluded: it has an address of the other family"
    ONE_LIST_EXCLUDED = (
        "OneListExcluded",
        Subject.ENDPOINTS,
        "excluded: mode ipvs has one list for all clients, with only those on this node",
    )
    HAIRPIN_LOST = (
        "HairpinLost",
        Subject.ENDPOINTS,
        "unusable: mode ipvs does not masquerade a pod that reaches itself if its node is not named",
    )
    NODE_IN_TUNNEL = (
        "NodeInTunnel",
        Subject.ENDPOINTS,
        "unusable: mode ipvs does not serve the node itself at addresses whose packets use a tunnel",
    )
    HAS_ADDRESS_ITSELF = (
        "HasAddressItself",
        Subject.ENDPOINTS,
        "excluded: the client is an endpoint with direct routing or a tunnel, and reaches itself",
    )
    LISTED = "Listed", Subject.ENDPOINTS, "used: in the kernel's list for this client"
    NOT_LISTED = (
        "NotListed",
        Subject.ENDPOINTS,
        "excluded: not in the kernel's list for this client; it drains, or the policy excludes it",
    )
    NO_ENDPOINTS = "NoEndpoints", Subject.ENDPOINTS, "the Service has no usable endpoint on any node"
    NONE_BY_POLICY = "NoneByPolicy", Subject.ENDPOINTS, "there are usable endpoints, but none on this node"
    LAST_ENDPOINTS_KEPT = (
        "LastEndpointsKept",
        Subject.ENDPOINTS,
        "default/kubernetes keeps its last endpoints while the API server lists none",
    )

    # Affinity
    NO_AFFINITY = "NoAffinity", Subject.AFFINITY, "sessionAffinity is None"
    AFFINITY_BY_NETNS = (
        "AffinityByNetns",
        Subject.AFFINITY,
        "ClientIP; the network namespace identifies the node, and a pod with several addresses of the family",
    )
    AFFINITY_BY_ADDRESS = (
        "AffinityByAddress",
        Subject.AFFINITY,
        "ClientIP; the source address identifies the client",
    )
    AFFINITY_KNOWN = (
        "AffinityKnown",
        Subject.AFFINITY,
        "the client has an endpoint by affinity, which it gets again",
    )
    AFFINITY_UNKNOWN = "AffinityUnknown", Subject.AFFINITY, "the client has no endpoint by affinity yet"

    # Algorithm
    RANDOM = "Random", Subject.ALGORITHM, "each usable endpoint has the same probability"
    RANDOM_BY_WEIGHT = (
        "RandomByWeight",
        Subject.ALGORITHM,
        "the probability of each usable endpoint is in proportion to its weight",
    )
    ALGORITHM = (
        "Algorithm",
        Subject.ALGORITHM,
        "the annotation lb-algorithm or the flag --lb-algorithm selects the algorithm",
    )
    BALANCING_IGNORED = (
        "BalancingIgnored",
        Subject.ALGORITHM,
        "this mode does not honor a part of the requested load balancing",
    )
    SCHEDULER = "Scheduler", Subject.ALGORITHM, "mode ipvs: the scheduler selects"
    RELAY_SELECTS = (
        "RelaySelects",
        Subject.ALGORITHM,
        "mode userspace: the relay selects them in turn (round robin)",
    )
    SINGLE = "Single", Subject.ALGORITHM, "there is only one usable endpoint"

    # Forwarding
    DIRECT_ROUTING = (
        "DirectRouting",
        Subject.FORWARDING,
        "mode ipvs: packets go to the endpoint's MAC address, and it replies to the client itself",
    )
    TUNNEL = (
        "Tunnel",
        Subject.FORWARDING,
        "mode ipvs: packets go to the endpoint in an IP tunnel, and it replies to the client itself",
    )
    DIRECT_RETURN = (
        "DirectReturn",
        Subject.FORWARDING,
        "mode ebpf: packets go in tunnels to the nodes of endpoints, which reply to the client themselves",
    )
    FORWARDING_LIMITED = (
        "ForwardingLimited",
        Subject.FORWARDING,
        "mode ipvs: packets are translated, because the requested forwarding is not possible",
    )

    # Masquerade
    POLICY_MASQUERADES = (
        "PolicyMasquerades",
        Subject.MASQUERADE,
        "masqueraded: the reply of an endpoint might not return through this node",
    )
    MASQUERADE_ALL = "MasqueradeAll", Subject.MASQUERADE, "masqueraded: --masquerade-all"
    HAIRPIN = "Hairpin", Subject.MASQUERADE, "masqueraded: the endpoint is the client itself"
    RELAY_IS_CLIENT = (
        "RelayIsClient",
        Subject.MASQUERADE,
        "mode userspace: the relay is the client of the endpoint, so the endpoint sees the node",
    )
    POLICY_KEEPS = (
        "PolicyKeeps",
        Subject.MASQUERADE,
        "not masqueraded: the traffic policy keeps the client's address",
    )
    SOCKET_IS_REWRITTEN = (
        "SocketIsRewritten",
        Subject.MASQUERADE,
        "not masqueraded: the socket connects to the endpoint itself",
    )
    REPLY_PASSES_NODE = (
        "ReplyPassesNode",
        Subject.MASQUERADE,
        "not masqueraded: the endpoint is on this node, so its reply passes the node anyway",
    )
    KEEPS_ADDRESSES = (
        "KeepsAddresses",
        Subject.MASQUERADE,
        "not masqueraded: with direct routing and tunnels the endpoint replies to the client itself",
    )
    ENDPOINT_IS_NODE = (
        "EndpointIsNode",
        Subject.MASQUERADE,
        "not masqueraded: the endpoint has an address of this node, so the packet leaves by no device",
    )
    NO_PROGRAM_AT_DEVICE = (
        "NoProgramAtDevice",
        Subject.MASQUERADE,
        "not masqueraded: the device that leads to the endpoint has no program",
    )

    # Addresses
    SEES_CLIENT = "SeesClient", Subject.ADDRESSES, "the server sees the client's own address"
    SEES_NODE = "SeesNode", Subject.ADDRESSES, "the server sees an address of this node"
    PEER_IS_FRONTEND = (
        "PeerIsFrontend",
        Subject.ADDRESSES,
        "the client sees the frontend address as its peer",
    )

    # Firewall
    FORWARD_DROPS = (
        "ForwardDrops",
        Subject.FIREWALL,
        "rules of another program drop or may drop packets",
    )

    # Kernel
    AGREES = "Agrees", Subject.KERNEL, "the kernel has the desired state of this ServicePort"
    DISAGREES = "Disagrees", Subject.KERNEL, "the kernel differs from the desired state of this ServicePort"

    # Outcome
    CONNECTS = "Connects", Subject.OUTCOME, "the connection reaches one of the usable endpoints"
    REJECTED_NO_ENDPOINTS = (
        "RejectedNoEndpoints",
        Subject.OUTCOME,
        "the connection is rejected: no node has a usable endpoint",
    )
    SCTP_NOT_RELAYED = (
        "SctpNotRelayed",
        Subject.OUTCOME,
        "the connection is rejected: mode userspace relays TCP and UDP only",
    )
    DROPPED_BY_POLICY = (
        "DroppedByPolicy",
        Subject.OUTCOME,
        "packets are dropped: only the traffic policy excludes the endpoints",
    )
    DROPPED_BY_RANGES = (
        "DroppedByRanges",
        Subject.OUTCOME,
        "packets are dropped: source ranges exclude the client",
    )
    DROPPED_IN_TUNNEL = (
        "DroppedInTunnel",
        Subject.OUTCOME,
        "packets are dropped: host-originated ones have the address of the Service as their source",
    )
    REJECTED_UNUSED_PORT = (
        "RejectedUnusedPort",
        Subject.OUTCOME,
        "the connection is rejected: no Service has the port",
    )
    DROPPED_UNALLOCATED = (
        "DroppedUnallocated",
        Subject.OUTCOME,
        "mode nftables drops packets to unallocated ClusterIPs, as kube-proxy does",
    )
    REJECTED_OR_DROPPED = (
        "RejectedOrDropped",
        Subject.OUTCOME,
        "mode iptables: rejected or dropped, depending on which of two rules is first",
    )
    NODE_PORT_DROPPED = (
        "NodePortDropped",
        Subject.OUTCOME,
        "mode iptables: policy Local drops packets to the NodePort at each address of the node",
    )
    NODE_PORT_REJECTED = (
        "NodePortRejected",
        Subject.OUTCOME,
        "mode iptables: without endpoints the NodePort is rejected at each address of the node",
    )
    REACHES_NODE = (
        "ReachesNode",
        Subject.OUTCOME,
        "no Service: a process of the node that listens there answers, otherwise it is refused",
    )
    ROUTED = "Routed", Subject.OUTCOME, "no Service: the packet is routed like any other"
    EXTERNAL_NOT_REJECTED = (
        "ExternalNotRejected",
        Subject.OUTCOME,
        "mode iptables: no rule rejects the node's packets to an external address: they are routed",
    )
    ECHO_ANSWERED = "EchoAnswered", Subject.OUTCOME, "the node answers the echo request"
    ECHO_NOT_ANSWERED = "EchoNotAnswered", Subject.OUTCOME, "nothing answers the echo request"
    HEALTH_CHECK_ANSWERED = (
        "HealthCheckAnswered",
        Subject.OUTCOME,
        "the agent answers: 200 if this node has a ready endpoint, else 503",
    )
    NO_SERVICE = "NoService", Subject.OUTCOME, "no service proxy serves the Service"
