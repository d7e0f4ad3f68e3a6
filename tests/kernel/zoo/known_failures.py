"""The flows that fail today, with their present results. Remove a row when its flows are right."""

from typing import NamedTuple


class Known(NamedTuple):
    """`ways`: names of `test_zoo.WAYS`; `flows`: a pattern of `Flow.matches`."""

    situations: tuple[str, ...]
    ways: tuple[str, ...]
    flows: str
    result: str
    reason: str


EBPF = ("ebpf", "ebpf-off")
BY_SOCKET = ("ebpf",)
BY_PACKET = ("ebpf-off",)
RELAY = ("userspace",)
LEFT_TO_NODE = "no failure: another Node's address is left to that Node, which has no agent in this situation"
BRIDGED_REPLY = "replies of pods at a bridge with the node's address do not return to the node itself"
SENT_BACK = "no failure: a rejection returns by the router, and reaches a guest that the node does not reach"
BEFORE_NAT = "programs at the uplink run before rules of netdev ingress and PREROUTING"

KNOWN_FAILURES: tuple[Known, ...] = (
    Known(("macvlan",), EBPF, "guest LoadBalancer empty * *", "refused", SENT_BACK),
    Known(("pods_on_a_bridge",), BY_PACKET, "node ClusterIP here * *", "silent", BRIDGED_REPLY),
    Known(
        ("pods_on_a_bridge",), BY_PACKET, "node NodePort|LoadBalancer here|local * *", "silent", BRIDGED_REPLY
    ),
    Known(
        ("servicelb_other",),
        RELAY,
        "pod|node|guest LoadBalancer here|there|local|away * *",
        "refused",
        LEFT_TO_NODE,
    ),
    Known(
        ("closed_before_nat", "closed_at_the_device"),
        EBPF,
        "outside NodePort here|local * *",
        "client",
        BEFORE_NAT,
    ),
    Known(
        ("closed_before_nat", "closed_at_the_device"), EBPF, "outside NodePort there * *", "node", BEFORE_NAT
    ),
    Known(
        ("closed_before_nat", "closed_at_the_device"),
        EBPF,
        "outside NodePort empty * *",
        "refused",
        BEFORE_NAT,
    ),
)
