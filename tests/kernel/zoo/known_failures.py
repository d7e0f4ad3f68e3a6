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
BY_PACKET = ("ebpf-off",)
RELAY = ("userspace",)
IPVS = ("ipvs",)
LEFT_TO_NODE = "no failure: another Node's address is left to that Node, which has no agent in this situation"
OF_BRIDGE = "packets of the node to pods at a bridge get the uplink's address instead of the bridge's"
SENT_BACK = "no failure: a rejection returns by the router, and reaches a guest that the node does not reach"
AT_A_DEVICE = "as in kube-proxy's mode ipvs, the address is this node's (kube-ipvs0), with all its ports"
READ_LATE = "as in kube-proxy's mode ipvs, the mark for masquerading is read after the plugin's chains"
BEFORE_NAT = "programs at the uplink run before rules of netdev ingress and PREROUTING"

KNOWN_FAILURES: tuple[Known, ...] = (
    Known(("macvlan",), EBPF, "guest LoadBalancer empty * *", "refused", SENT_BACK),
    *(
        Known(("pods_on_a_bridge",), BY_PACKET, f"node {flows} * {family}", address, OF_BRIDGE)
        for flows in ("ClusterIP here", "NodePort|LoadBalancer here|local")
        for family, address in (("v4", "172.18.78.2"), ("v6", "fd00:172:18:78::2"))
    ),
    Known(
        ("servicelb_other",),
        RELAY,
        "pod|node|guest LoadBalancer here|there|local|away * *",
        "refused",
        LEFT_TO_NODE,
    ),
    Known(("servicelb_other",), IPVS, "pod|node|guest Address second tcp *", "refused", AT_A_DEVICE),
    *(
        Known(("marks_of_cni",), IPVS, flows, result, READ_LATE)
        for flows, result in (
            ("pod NodePort|LoadBalancer here|there * *", "client"),
            ("outside ClusterIP|NodePort|LoadBalancer here * *", "client"),
            ("outside ClusterIP|NodePort|LoadBalancer there * *", "silent"),
        )
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
