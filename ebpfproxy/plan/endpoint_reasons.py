"""Why new connections may or may not use an endpoint. `endpoints.py` decides and records it."""

from ebpfproxy.plan.reason import AnyReason


class EndpointReason(AnyReason):
    """Why an endpoint is used (the first ones) or excluded."""

    READY = "endpoints: used: ready"
    READY_HINT_NODE = "endpoints: used: ready, and a hint assigns it to this node"
    READY_HINT_ZONE = "endpoints: used: ready, and a hint assigns it to this node's zone"
    READY_ON_NODE = "endpoints: used: ready, and on this node"
    ONLY_TERMINATING = "endpoints: used: terminating but serving, and no endpoint is ready"
    ONLY_TERMINATING_ON_NODE = "endpoints: used: terminating but serving, and none on this node is ready"
    NOT_READY = "endpoints: excluded: not ready"
    NOT_SERVING = "endpoints: excluded: terminating, and no longer serving"
    TERMINATING = "endpoints: excluded: terminating, and others are ready"
    HINT_OTHER_NODE = "endpoints: excluded: a hint assigns it to another node"
    HINT_OTHER_ZONE = "endpoints: excluded: a hint assigns it to another zone"
    NOT_LOCAL = "endpoints: excluded: on another node, and the policy is Local"
    NODE_UNKNOWN = "endpoints: excluded: its EndpointSlice names no node"
    POD_OF_HOST_PORT = "endpoints: used: the pod that has this host port"
    FULL = "endpoints: excluded for now: it has its share of the open connections (--rebalance)"
    NO_WEIGHT = "endpoints: excluded: the annotation endpoint-weights gives it weight 0"
