"""Commands of ip(8) that join places, and how they are run."""

import subprocess
from collections.abc import Iterator

from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.lab.pod import Pod


def ip(place: Pod, *commands: str) -> None:
    """Run `ip` commands in a place, all in one batch.

    Raises Unsupported for a kind of device that the kernel lacks, else KernelError with what ip said.
    """
    done = subprocess.run(
        ["ip", "-n", place.namespace, "-batch", "-"],
        input="\n".join(commands),
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        kind = Unsupported if "Unknown device type" in done.stderr else KernelError
        raise kind(f"ip -n {place.namespace}: {done.stderr.strip()}")


def lead(parent: Pod, gateway: Pair, leaf: Pod, device: str) -> None:
    """A veth pair between the two, and no bridge, as the CNI plugin ptp makes it.

    The parent's end, `device`, has the gateway's address, and the leaf's address is routed there; the
    leaf's end is called eth0, and its default route is the gateway.
    """
    ip(
        parent,
        f"link add {device} type veth peer name eth0 netns {leaf.namespace}",
        f"addr add {gateway.v4}/32 dev {device}",
        f"addr add {gateway.v6}/128 dev {device} nodad",
        f"link set {device} up",
        f"route add {leaf.v4}/32 dev {device} src {gateway.v4}",
        f"route add {leaf.v6}/128 dev {device}",
    )
    ip(
        leaf,
        "link set lo up",
        f"addr add {leaf.v4}/32 dev eth0",
        f"addr add {leaf.v6}/128 dev eth0 nodad",
        "link set eth0 up",
        f"route add {gateway.v4}/32 dev eth0 scope link",
        f"route add {gateway.v6}/128 dev eth0",
        f"route add default via {gateway.v4}",
        f"route add default via {gateway.v6}",
    )


def link(node: Pod, outside: Pod) -> None:
    """The two on one network, each the other's default route; the node's end is called eth0, too."""
    ip(
        node,
        "link set lo up",
        f"link add eth0 type veth peer name eth0 netns {outside.namespace}",
        *_on_network(node),
    )
    ip(outside, "link set lo up", *_on_network(outside), *_default(Pair(node.v4, node.v6)))
    ip(node, *_default(Pair(outside.v4, outside.v6)))


def _on_network(place: Pod) -> Iterator[str]:
    yield f"addr add {place.v4}/24 dev eth0"
    yield f"addr add {place.v6}/64 dev eth0 nodad"
    yield "link set eth0 up"


def _default(gateway: Pair) -> Iterator[str]:
    yield f"route add default via {gateway.v4}"
    yield f"route add default via {gateway.v6}"
