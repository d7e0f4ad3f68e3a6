"""The situations: each function changes the base node. The first line says what is special.

The last line names a public report, or the program whose setup it is.
"""

from ebpfproxy.lab.addresses import Pair
from tests.kernel.zoo.base import BALANCERS, Situation, Zoo


def plain(node: Zoo) -> None:
    """The base node."""


# Guests


def routed_guest(node: Zoo) -> None:
    """A guest at a bridge that nobody masquerades, as with libvirt's forward mode "route".

    kubernetes/kubernetes#61705
    """
    gateway = Pair("10.88.0.1", "fd00:10:88::1")
    node.bridge("virbr1", gateway)
    node.guest_at_bridge("virbr1", gateway, 2, "vnet0")


def docker_drops(node: Zoo) -> None:
    """The chain FORWARD drops everything but Docker's packets, those of pods and replies.

    projectcalico/calico#875
    """
    pods = node.lab.addresses.all_pods
    node.chain(
        "inet firewall",
        "filter hook forward priority filter",
        "ct state established,related accept",
        'iifname "docker0" accept',
        f"ip saddr {pods.v4} accept",
        f"ip daddr {pods.v4} accept",
        f"ip6 saddr {pods.v6} accept",
        f"ip6 daddr {pods.v6} accept",
        policy="drop",
    )


def _without_addresses(node: Zoo) -> list[str]:
    """Commands that remove the uplink's addresses and routes."""
    return [
        f"route del default via {node.lab.addresses.router.v6} dev eth0",
        f"route del {node.lab.addresses.router.v6}/128 dev eth0",
        "addr flush dev eth0",
    ]


def _at_uplink_bridge(node: Zoo) -> None:
    """Move the uplink's addresses and routes to br0, whose port the uplink becomes."""
    gateway, own = node.lab.addresses.router, node.node
    node.ip(
        "link add br0 type bridge",
        "link set br0 up",
        *_without_addresses(node),
        "link set eth0 master br0",
        f"addr add {own.v4}/32 dev br0",
        f"addr add {own.v6}/128 dev br0 nodad",
        f"route add {gateway.v4}/32 dev br0 scope link",
        f"route add {gateway.v6}/128 dev br0",
        f"route add default via {gateway.v4}",
        f"route add default via {gateway.v6}",
    )


def _at_uplink(node: Zoo, device: str) -> None:
    """Give the guest, whose eth0 is on the uplink's link, its addresses and routes.

    Its router is the LAN's, which routes load balancer addresses to the node and does not know the pods.
    """
    gateway, own = node.lab.addresses.router, node.node
    guest = node.guest
    node.lab.ip(
        guest,
        f"addr add {guest.v4}/32 dev eth0",
        f"addr add {guest.v6}/128 dev eth0 nodad",
        "link set eth0 up",
        *(f"route add {address}/32 dev eth0 scope link" for address in (gateway.v4, own.v4)),
        *(f"route add {address}/128 dev eth0" for address in (gateway.v6, own.v6)),
        f"route add default via {gateway.v4}",
        f"route add default via {gateway.v6}",
    )
    node.ip(f"route add {guest.v4}/32 dev {device} scope link", f"route add {guest.v6}/128 dev {device}")
    node.lab.ip(
        node.router,
        f"route add {guest.v4}/32 dev node",
        f"route add {guest.v6}/128 dev node",
        f"route add {BALANCERS.v4} via {own.v4} table 101",
        f"route add {BALANCERS.v6} via {own.v6} table 101",
    )
    pods = node.lab.addresses.all_pods
    for family, source, unknown in (("-4", guest.v4, pods.v4), ("-6", guest.v6, pods.v6)):
        node.router.run(["ip", family, "rule", "add", "from", source, "lookup", "101"])
        node.router.run(["ip", family, "rule", "add", "from", source, "to", unknown, "blackhole"])
    # Its ClusterIPs end at the router, which knows no Services.
    node.expect("silent", "guest ClusterIP * * *")


def _on_link(node: Zoo, host: int = 50) -> Pair:
    """An address in the nodes' network."""
    return Pair(f"172.18.{node.lab.number}.{host}", f"fd00:172:18:{node.lab.number}::{host:x}")


def lxc_on_the_uplink(node: Zoo) -> None:
    """A container whose port is on the uplink's bridge: it is a machine of the LAN with the LAN's router.

    canonical/k8s-snap#1481
    """
    _at_uplink_bridge(node)
    node.sysctl(node.node, *(f"net/bridge/bridge-nf-call-{each}=0" for each in ("iptables", "ip6tables")))
    guest = node.guest_netns(_on_link(node))
    node.ip(
        f"link add vlxc type veth peer name eth0 netns {guest.namespace}",
        "link set vlxc master br0 up",
    )
    _at_uplink(node, "br0")


def macvlan(node: Zoo) -> None:
    """A guest with a macvlan device of the uplink: the node's own packets do not reach it.

    k8snetworkplumbingwg/multus-cni#226
    """
    guest = node.guest_netns(_on_link(node))
    node.ip(
        "link add link eth0 name mv0 type macvlan mode private",
        f"link set mv0 netns {guest.namespace} name eth0",
    )
    _at_uplink(node, "eth0")
    node.expect("silent", "guest * here|there|local|empty * *")


# Uplinks


def mtu_1280(node: Zoo) -> None:
    """The uplink and all pods have an MTU of 1280."""
    node.ip("link set eth0 mtu 1280", "link set vetha mtu 1280", "link set vethp mtu 1280")
    node.lab.ip(node.router, "link set node mtu 1280")


def mtu_9000(node: Zoo) -> None:
    """The node's devices have jumbo frames, the other node does not."""
    node.ip("link set eth0 mtu 9000", "link set vetha mtu 9000", "link set vethp mtu 9000")
    node.lab.ip(node.router, "link set node mtu 9000")


def renamed_uplink(node: Zoo) -> None:
    """The uplink has another name, and an alternative one.

    cilium/cilium#19349
    """
    node.ip("link set eth0 name enp0s31f6d1", "link property add dev enp0s31f6d1 altname eth0")


SITUATIONS: dict[str, Situation] = {
    each.__name__: each
    for each in (
        plain,
        routed_guest,
        docker_drops,
        lxc_on_the_uplink,
        macvlan,
        mtu_1280,
        mtu_9000,
        renamed_uplink,
    )
}
