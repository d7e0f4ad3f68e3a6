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
GUEST_SOCKET = "a socket in any other network namespace counts as a pod's, and connects to endpoints directly"
GUEST_DEVICE = "a guest's bridge or bridge port counts as a pod's device, so that its packets are a pod's"

KNOWN_FAILURES: tuple[Known, ...] = (
    Known(
        ("plain", "docker_drops", "mtu_1280", "mtu_9000", "renamed_uplink"),
        BY_SOCKET,
        "guest NodePort|LoadBalancer away * *",
        "node",
        GUEST_SOCKET,
    ),
    Known(
        ("plain", "docker_drops", "mtu_1280", "mtu_9000", "renamed_uplink"),
        BY_PACKET,
        "guest NodePort|LoadBalancer away * *",
        "node",
        GUEST_DEVICE,
    ),
    Known(("routed_guest",), BY_SOCKET, "guest * there * *", "silent", GUEST_SOCKET),
    Known(("routed_guest",), BY_PACKET, "guest ClusterIP there * *", "silent", GUEST_DEVICE),
    Known(("lxc_on_the_uplink",), BY_SOCKET, "guest ClusterIP empty tcp *", "refused", GUEST_SOCKET),
    Known(
        ("lxc_on_the_uplink",),
        BY_SOCKET,
        "guest NodePort|LoadBalancer here|there|local * *",
        "silent",
        GUEST_SOCKET,
    ),
    Known(("lxc_on_the_uplink",), BY_PACKET, "guest ClusterIP empty * *", "refused", GUEST_DEVICE),
    Known(("lxc_on_the_uplink",), BY_PACKET, "guest LoadBalancer here|local * *", "silent", GUEST_DEVICE),
    Known(("lxc_on_the_uplink",), BY_PACKET, "outside ClusterIP there * *", "silent", GUEST_DEVICE),
    Known(("macvlan",), BY_SOCKET, "guest ClusterIP|LoadBalancer empty * *", "refused", GUEST_SOCKET),
    Known(("macvlan",), BY_SOCKET, "guest NodePort empty tcp *", "refused", GUEST_SOCKET),
    Known(("macvlan",), BY_PACKET, "guest ClusterIP|LoadBalancer empty * *", "refused", GUEST_DEVICE),
)
