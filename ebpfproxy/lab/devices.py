"""Network devices: connections between network namespaces by ip(8)."""

import subprocess
from collections.abc import Iterator

from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.lab.pod import Pod


def ip(pod: Pod, *commands: str) -> None:
    """Run `ip` commands in the pod's network namespace, in one batch.

    Raises Unsupported if the kernel lacks a kind of device, otherwise KernelError with the error of ip.
    """
    done = subprocess.run(
        ["ip", "-n", pod.namespace, "-batch", "-"],
        input="\n".join(commands),
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        kind = Unsupported if "Unknown device type" in done.stderr else KernelError
        raise kind(f"ip -n {pod.namespace}: {done.stderr.strip()}")


def connect_routed(parent: Pod, gateway: Pair, child: Pod, device: str) -> None:
    """Connect both by a veth pair without a bridge, as the CNI plugin ptp does.

    The parent's end is named `device`. It has the gateway's address, and a route to the child's address. The
    child's end is named eth0; the child's default route is the gateway.
    """
    ip(
        parent,
        f"link add {device} type veth peer name eth0 netns {child.namespace}",
        f"addr add {gateway.v4}/32 dev {device}",
        f"addr add {gateway.v6}/128 dev {device} nodad",
        f"link set {device} up",
        f"route add {child.v4}/32 dev {device} src {gateway.v4}",
        f"route add {child.v6}/128 dev {device}",
    )
    ip(
        child,
        "link set lo up",
        f"addr add {child.v4}/32 dev eth0",
        f"addr add {child.v6}/128 dev eth0 nodad",
        "link set eth0 up",
        f"route add {gateway.v4}/32 dev eth0 scope link",
        f"route add {gateway.v6}/128 dev eth0",
        f"route add default via {gateway.v4}",
        f"route add default via {gateway.v6}",
    )


def connect_by_link(router: Pod, address: Pair, child: Pod, device: str) -> None:
    """Connect both by a veth pair with a network of two addresses in each family, /31 and /127.

    The router's end is named `device`, the child's eth0. The router, with `address`, is the default route of
    the child.
    """
    ip(
        router,
        f"link add {device} type veth peer name eth0 netns {child.namespace}",
        f"addr add {address.v4}/31 dev {device}",
        f"addr add {address.v6}/127 dev {device} nodad",
        f"link set {device} up",
    )
    ip(
        child,
        "link set lo up",
        f"addr add {child.v4}/31 dev eth0",
        f"addr add {child.v6}/127 dev eth0 nodad",
        "link set eth0 up",
        *_default(address),
    )


def connect_directly(node: Pod, outside: Pod) -> None:
    """Connect both by a veth pair in one network. Each is the other's default route; both ends are eth0."""
    ip(
        node,
        "link set lo up",
        f"link add eth0 type veth peer name eth0 netns {outside.namespace}",
        *_on_network(node),
    )
    ip(outside, "link set lo up", *_on_network(outside), *_default(Pair(node.v4, node.v6)))
    ip(node, *_default(Pair(outside.v4, outside.v6)))


def _on_network(pod: Pod) -> Iterator[str]:
    yield f"addr add {pod.v4}/24 dev eth0"
    yield f"addr add {pod.v6}/64 dev eth0 nodad"
    yield "link set eth0 up"


def _default(gateway: Pair) -> Iterator[str]:
    yield f"route add default via {gateway.v4}"
    yield f"route add default via {gateway.v6}"


# --- Offloads ---
