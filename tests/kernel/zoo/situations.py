"""The situations: each function changes the base node. The first line says what is special.

The last line names a public report, or the program whose setup it is.
"""

import itertools

from ebpfproxy.lab import PodNetwork
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.lab.devices import connect_routed
from tests.kernel.clients import REFUSED
from tests.kernel.cluster import SERVICE_NETWORKS
from tests.kernel.zoo.base import BALANCERS, PORTS, Situation, Zoo
from tests.kernel.zoo.flows import PROTOCOLS


def plain(node: Zoo) -> None:
    """Nothing: the base node, with Docker beside.

    kubernetes/kubernetes#40182
    """


# Guests


def routed_guest(node: Zoo) -> None:
    """A guest at a bridge that no rule masquerades, as with libvirt's forward mode "route".

    charmed-kubernetes/kubernetes-docs#390
    """
    gateway = Pair("10.88.0.1", "fd00:10:88::1")
    node.bridge("virbr1", gateway)
    node.guest_at_bridge("virbr1", gateway, 2, "vnet0")
    node.expect("silent", "guest Address second * *")


def virtual_machine(node: Zoo) -> None:
    """A VM behind a tap device at a bridge that libvirt masquerades.

    libvirt: network default (virbr0)
    """
    gateway = Pair("192.168.122.1", "fd00:192:168:122::1")
    node.bridge("virbr0", gateway)
    node.guest_at_bridge("virbr0", gateway, 2, "vnet0", is_vm=True)
    node.masquerade("virbr0", Pair("192.168.122.0/24", "fd00:192:168:122::/64"))


def _without_addresses(node: Zoo) -> list[str]:
    """Commands that remove the uplink's addresses and routes."""
    return [
        f"route del default via {node.lab.addresses.router.v6} dev eth0",
        f"route del {node.lab.addresses.router.v6}/128 dev eth0",
        "addr flush dev eth0 scope global",
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
    node.expect("silent", "guest * here|there|local|empty|self * *")


def nspawn(node: Zoo) -> None:
    """systemd-nspawn: a guest at a veth pair without a bridge, as a pod, masqueraded by systemd-networkd.

    systemd: network/80-container-ve.network
    """
    gateway, own = Pair("10.0.0.1", "fd00:10::1"), Pair("10.0.0.2", "fd00:10::2")
    connect_routed(node.node, gateway, node.guest_netns(own), "ve-guest")
    node.ip(f"addr add {gateway.v4}/28 dev ve-guest")
    node.masquerade("ve-guest", Pair("10.0.0.0/28", "fd00:10::/64"))


def nested_cluster(node: Zoo) -> None:
    """A pod runs another cluster, whose network has the same Services: one of them has an endpoint inside.

    cilium/cilium#16259
    """
    pod, inner, own = node.pod, Pair("10.60.0.1", "fd00:10:60::1"), Pair("10.60.0.2", "fd00:10:60::2")
    guest = node.guest_netns(own, parent=pod.cgroup)
    connect_routed(pod, inner, guest, "vethinner")
    service = node.frontend("ClusterIP", "here")
    for word, address, target in (("ip", service.v4, inner.v4), ("ip6", service.v6, f"[{inner.v6}]")):
        port = f"meta l4proto {{ tcp, udp }} th dport {PORTS['here']}"
        rule = f"{word} daddr {address} {port} dnat to {target}:7070"
        node.chain(f"{word} inner", "nat hook prerouting priority dstnat", rule, netns=pod)
        rule = 'oifname "eth0" masquerade'
        node.chain(f"{word} innermasq", "nat hook postrouting priority srcnat", rule, netns=pod)
    for protocol in PROTOCOLS:
        for address in inner:
            pod.serve(protocol, 7070, lambda client, _port: f"inner {client}", address)
    node.by_packet.add("pod")
    node.source_seen["guest"] = Pair(pod.v4, pod.v6)
    node.expect_as_pod("guest")
    node.expect("inner " + own.v4, "guest ClusterIP here * v4")
    node.expect("inner " + own.v6, "guest ClusterIP here * v6")


def host_network_pod(node: Zoo) -> None:
    """The client on the node is a pod with hostNetwork: its cgroup is a pod's.

    cilium/cilium#48420
    """
    node.clients["node"] = node.in_cgroup(node.node, "kubepods.slice/kubepods-pod0a.slice/cri-0a.scope")


def vpn_pod(node: Zoo) -> None:
    """The pod has a VPN with a kill switch: its own firewall accepts only Services and addresses of nodes.

    passteque/gluetun#188
    """
    accepted = [
        'oifname "lo" accept',
        "ip daddr { 10.96.0.0/12, 172.18.0.0/16 } accept",
        "ip6 daddr { fd00:10:96::/48, fd00:172:18::/48 } accept",
        "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept",
    ]
    node.by_packet.add("pod")
    node.chain("inet kill", "filter hook output priority filter", *accepted, policy="drop", netns=node.pod)


def multus_pod(node: Zoo) -> None:
    """The pod has a second network with its default route; the first one has routes to Services and nodes.

    k8snetworkplumbingwg/multus-cni#1294
    """
    node.by_packet.add("pod")
    gateway = node.lab.addresses.gateway(0)
    node.lab.ip(
        node.router,
        f"link add iot type veth peer name net1 netns {node.pod.namespace}",
        "addr add 10.50.0.1/24 dev iot",
        "addr add fd00:10:50::1/64 dev iot nodad",
        "link set iot up",
    )
    node.by_router("iif iot blackhole")
    node.lab.ip(
        node.pod,
        "addr add 10.50.0.2/24 dev net1",
        "addr add fd00:10:50::2/64 dev net1 nodad",
        "link set net1 up",
        *(f"route add {network} via {gateway.v4}" for network in ("10.96.0.0/12", "172.18.0.0/16")),
        *(f"route add {network} via {gateway.v6}" for network in ("fd00:10:96::/48", "fd00:172:18::/48")),
        "route replace default via 10.50.0.1",
        f"route del default via {gateway.v6}",
        "route add default via fd00:10:50::1",
    )


def pods_on_a_bridge(node: Zoo) -> None:
    """The pods are ports of one bridge with the node's address, as with the plugin bridge (Flannel, k3s).

    kubernetes/kubernetes#38802
    """
    gateway = node.lab.addresses.gateway(0)
    for pod in (node.a, node.pod):
        node.ip(
            f"route del {pod.v4}/32 dev {pod.device}",
            f"route del {pod.v6}/128 dev {pod.device}",
            f"addr flush dev {pod.device}",
        )
    node.bridge("cni0", gateway)
    node.ip(*(f"link set {pod.device} master cni0" for pod in (node.a, node.pod)))
    node.flags = ["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cni0"]


# Addresses


def on_link_balancer(node: Zoo) -> None:
    """Load balancer addresses are in the node's own network, as with layer 2 of MetalLB.

    metallb/metallb#932
    """
    number = node.lab.number
    node.balancer = lambda index: _on_link(node, 96 + index)
    networks = f"172.18.{number}.96/28", f"fd00:172:18:{number}::60/124"
    for network, gateway in zip(networks, (node.node.v4, node.node.v6), strict=True):
        node.ip(f"route add {network} dev eth0")
        node.lab.ip(node.router, f"route add {network} via {gateway}")


def servicelb_own(node: Zoo) -> None:
    """Load balancer addresses are the node's own address, as with ServiceLB of k3s.

    k3s-io/k3s#2925
    """
    node.balancer = lambda _index: Pair(node.node.v4, node.node.v6)
    node.beyond = REFUSED


def servicelb_other(node: Zoo) -> None:
    """Load balancer addresses are another node's address, whose other ports must stay reachable.

    k3s-io/k3s#5000
    """
    node.balancer = lambda _index: Pair(node.second.v4, node.second.v6)
    node.beyond = REFUSED
    # The network routes the client's packets to that node, which has no agent.
    node.expect("refused", "outside LoadBalancer * * *")


def dns_cache(node: Zoo) -> None:
    """NodeLocal DNSCache: a process of the node has a Service's address, and no packet to it is tracked.

    antrea-io/antrea#2137
    """
    address = node.frontend("ClusterIP", "here")
    node.ip("link add nodelocaldns type bridge", "link set nodelocaldns up")
    node.ip(f"addr add {address.v4}/32 dev nodelocaldns", f"addr add {address.v6}/128 dev nodelocaldns nodad")
    for word, each in (("ip", address.v4), ("ip6", address.v6)):
        for hook, field in itertools.product(("prerouting", "output"), ("daddr", "saddr")):
            node.chain(
                f"{word} {hook}{field}", f"filter hook {hook} priority raw", f"{word} {field} {each} notrack"
            )
        for protocol in PROTOCOLS:
            node.node.serve(protocol, PORTS["here"], lambda client, _port: f"cache {client}", each)
    for client in ("pod", "guest", "outside"):
        node.expect("cache client", f"{client} ClusterIP here * *")
    node.expect(f"cache {address.v4}", "node ClusterIP here * v4")
    node.expect(f"cache {address.v6}", "node ClusterIP here * v6")


def vrrp(node: Zoo) -> None:
    """Clients use the NodePorts of a virtual address, which comes to the node after the agent's start.

    cilium/cilium#37691
    """
    address = _on_link(node, 60)

    def fail_over() -> None:
        node.ip(
            f"addr add {address.v4}/32 dev eth0", f"addr add {address.v6}/128 dev eth0 nodad preferred_lft 0"
        )
        node.addresses = dict.fromkeys(node.addresses, address)
        node.addresses["node"] = Pair(node.node.v4, node.node.v6)

    for each, own, length in ((address.v4, node.node.v4, 32), (address.v6, node.node.v6, 128)):
        node.lab.ip(node.router, f"route add {each}/{length} via {own}")
    node.changes.append(fail_over)


def dhcp(node: Zoo) -> None:
    """The uplink's address changes while the agent runs, and so does the Node object.

    kubernetes/kubernetes#138183
    """
    old, new = Pair(node.node.v4, node.node.v6), _on_link(node, 61)

    def renew() -> None:
        gateway = node.lab.addresses.router
        node.ip(f"addr add {new.v4}/32 dev eth0", f"addr add {new.v6}/128 dev eth0 nodad")
        pods = node.lab.addresses.pods(0)
        node.lab.ip(
            node.router,
            f"route add {new.v4}/32 dev node",
            f"route add {new.v6}/128 dev node",
            f"route replace {pods.v4} via {new.v4}",
            f"route replace {pods.v6} via {new.v6}",
            *(f"route replace {SERVICE_NETWORKS[0]} via {new.v4} table 100",),
            *(f"route replace {SERVICE_NETWORKS[1]} via {new.v6} table 100",),
        )
        node.ip(f"addr del {old.v4}/32 dev eth0", f"addr del {old.v6}/128 dev eth0")
        node.ip(f"route replace default via {gateway.v4} dev eth0")
        node.addresses = dict.fromkeys(node.addresses, new)
        node.towards |= {"there": new, "second": new}
        node.write()

    node.changes.append(renew)


def nat64_client(node: Zoo) -> None:
    """The client outside has IPv4: a gateway shows it with an address of the prefix 64:ff9b::/96.

    cilium/cilium#13891
    """
    source = "64:ff9b::c000:221"
    node.lab.ip(node.outside, f"addr add {source}/128 dev lo nodad preferred_lft 0")
    node.lab.ip(node.router, f"route add {source}/128 via {node.outside.v6}")
    node.source["outside"] = Pair(node.outside.v4, source)


def bound_source(node: Zoo) -> None:
    """Clients on the node are bound to the address of a bridge, which the network does not route back.

    kubernetes/kubernetes#57922
    """
    node.source["node"] = Pair("10.77.0.1", "fd00:10:77::1")
    node.bridge("br-idle", node.source["node"])
    node.expect("silent", "node Address second * *")
    # The first connections to NodePorts only cause programs to be attached to loopback.
    node.changes.append(lambda: None)


def two_subnets(node: Zoo) -> None:
    """The uplink's first address is of another network, whose replies do not return.

    kubernetes/kubernetes#119060
    """
    own = node.node
    node.ip(
        *_without_addresses(node),
        "addr add 192.168.77.2/24 dev eth0 noprefixroute",
        f"addr add {own.v4}/24 dev eth0 noprefixroute",
        "addr add 2001:db8:77::2/64 dev eth0 nodad noprefixroute",
        f"addr add {own.v6}/64 dev eth0 nodad noprefixroute",
        *_uplink_routes(node, "eth0", f"src {own.v4}"),
    )


def ula_and_global(node: Zoo) -> None:
    """The uplink has a global IPv6 address, too, which the network of the pods does not route back.

    openstack-k8s-operators/ci-framework#1878
    """
    node.ip("addr add 2001:db8:77::2/64 dev eth0 nodad noprefixroute")


def address_on_loopback(node: Zoo) -> None:
    """The node's IPv4 address is on lo, as with BGP to the host; the uplink has none.

    kubernetes/kubernetes#78949
    """
    own, gateway = node.node, node.lab.addresses.router
    node.ip(
        f"addr del {own.v4}/32 dev eth0",
        f"addr add {own.v4}/32 dev lo",
        f"route replace {gateway.v4}/32 dev eth0 scope link",
        f"route replace default via {gateway.v4} dev eth0 src {own.v4}",
    )
    node.lab.ip(node.router, "link set node arp on")


# Uplinks


def unnumbered(node: Zoo) -> None:
    """The next hop of IPv4 is a link-local IPv6 address (RFC 5549), as with BGP unnumbered.

    FRRouting/frr#16581
    """
    node.lab.ip(node.router, "addr add fe80::1/64 dev node nodad")
    gateway = node.lab.addresses.router
    node.node.run(["ip", "-4", "route", "replace", "default", "via", "inet6", "fe80::1", "dev", "eth0"])
    node.ip(
        f"route del {gateway.v4}/32 dev eth0",
        f"route del default via {gateway.v6}",
        "route add default via fe80::1 dev eth0",
    )


def _uplink_routes(node: Zoo, device: str, source: str = "") -> list[str]:
    gateway = node.lab.addresses.router
    return [
        f"route add {gateway.v4}/32 dev {device} scope link",
        f"route add {gateway.v6}/128 dev {device}",
        f"route add default via {gateway.v4} {source}",
        f"route add default via {gateway.v6}",
    ]


def bridge_uplink(node: Zoo) -> None:
    """The uplink is a port of a bridge, which has its addresses.

    cilium/cilium#40420
    """
    _at_uplink_bridge(node)
    node.sysctl(node.node, *(f"net/bridge/bridge-nf-call-{each}=0" for each in ("iptables", "ip6tables")))


def second_network_card(node: Zoo) -> None:
    """The node is a container with a second network card, which has clients but no default route.

    kubernetes/kubernetes#22698
    """
    own = node.second_uplink()
    number, client = node.lab.number, node.outside
    node.ip(
        f"route add {client.v4}/32 via 172.19.{number}.254 dev eth1",
        f"route add {client.v6}/128 via fd00:172:19:{number}::fe dev eth1",
    )
    node.lab.ip(
        node.router,
        *(f"route replace {SERVICE_NETWORKS[0]} via {own.v4} table 100",),
        *(f"route replace {SERVICE_NETWORKS[1]} via {own.v6} table 100",),
    )
    node.addresses["outside"] = own


def several_paths(node: Zoo) -> None:
    """The default route has two next hops at two uplinks (ECMP), as in a routed data center.

    romana/romana#179
    """
    node.also_towards = node.second_uplink()
    for netns in (node.node, node.router):
        node.sysctl(netns, "net/ipv4/conf/all/rp_filter=2")
    number, gateway = node.lab.number, node.lab.addresses.router
    for family, first, second in (
        ("-4", gateway.v4, f"172.19.{number}.254"),
        ("-6", gateway.v6, f"fd00:172:19:{number}::fe"),
    ):
        hops = ("nexthop", "via", first, "dev", "eth0", "nexthop", "via", second, "dev", "eth1")
        node.node.run(["ip", family, "route", "replace", "default", *hops])


def asymmetric(node: Zoo) -> None:
    """Clients reach the node by a second uplink; replies leave by the first one, which no filter drops.

    cilium/cilium#13130
    """
    own = node.second_uplink()
    for netns in (node.node, node.router):
        node.sysctl(netns, "net/ipv4/conf/all/rp_filter=2")
    node.lab.ip(
        node.router,
        *(f"route replace {SERVICE_NETWORKS[0]} via {own.v4} table 100",),
        *(f"route replace {SERVICE_NETWORKS[1]} via {own.v6} table 100",),
    )
    node.addresses["outside"] = own


def pods_by_second_uplink(node: Zoo) -> None:
    """A routing rule sends the pods' packets by a second uplink, as the AWS VPC plugin does.

    aws/amazon-vpc-cni-k8s#75
    """
    node.second_uplink()
    for netns in (node.node, node.router):
        node.sysctl(netns, "net/ipv4/conf/all/rp_filter=2")
    number, pods = node.lab.number, node.lab.addresses.pods(0)
    node.ip(
        f"route add default via 172.19.{number}.254 dev eth1 table 200",
        f"route add default via fd00:172:19:{number}::fe dev eth1 table 200",
    )
    for family, own, docker in (("-4", pods.v4, "172.17.0.0/16"), ("-6", pods.v6, "fd00:172:17::/64")):
        for to in (own, docker):
            node.node.run(["ip", family, "rule", "add", "to", to, "lookup", "main", "priority", "512"])
        node.node.run(["ip", family, "rule", "add", "from", own, "lookup", "200", "priority", "1024"])
    node.towards["there from pod"] = Pair(f"172.19.{number}.2", f"fd00:172:19:{number}::2")


def tun_pod_network(node: Zoo) -> None:
    """Packets between nodes' pods go by a device without an Ethernet header, as WireGuard's.

    cilium/cilium#36491
    """
    node.lab.backbone.join(PodNetwork.USER)
    node.towards["there"] = node.lab.addresses.tunnel(0)
    # The second node replies by the tunnel, which the reverse path filter rejects.
    node.expect("silent", "pod Address second * v4")


def vxlan_pod_network(node: Zoo) -> None:
    """Packets between nodes' pods go by VXLAN.

    cilium/cilium#23241
    """
    node.lab.backbone.join(PodNetwork.VXLAN)
    node.towards["there"] = node.lab.addresses.tunnel(0)
    # The second node replies by the tunnel, which the reverse path filter rejects.
    node.expect("silent", "pod Address second * v4")


def mtu_1280(node: Zoo) -> None:
    """The uplink and all pods have an MTU of 1280.

    RFC 8200, section 5
    """
    node.ip("link set eth0 mtu 1280", "link set vetha mtu 1280", "link set vethp mtu 1280")
    node.lab.ip(node.router, "link set node mtu 1280")


def mtu_9000(node: Zoo) -> None:
    """The node's devices have jumbo frames, the other node has not.

    kubeovn/kube-ovn#4254
    """
    node.ip("link set eth0 mtu 9000", "link set vetha mtu 9000", "link set vethp mtu 9000")
    node.lab.ip(node.router, "link set node mtu 9000")


def renamed_uplink(node: Zoo) -> None:
    """The uplink is renamed while the agent runs, and has an alternative name.

    cilium/cilium#17187
    """
    node.changes.append(lambda: node.ip("link set eth0 name lan0", "link property add dev lan0 altname eth0"))


def recreated_uplink(node: Zoo) -> None:
    """The uplink is replaced by a new device of the same name and addresses while the agent runs.

    cilium/cilium#24481
    """

    def replace() -> None:
        node.ip("link del eth0")
        connect_routed(node.router, node.lab.addresses.router, node.node, "node")
        pods = node.lab.addresses.pods(0)
        own = node.node
        node.lab.ip(
            node.router,
            f"route replace {pods.v4} via {own.v4}",
            f"route replace {pods.v6} via {own.v6}",
            f"route replace {SERVICE_NETWORKS[0]} via {own.v4} table 100",
            f"route replace {SERVICE_NETWORKS[1]} via {own.v6} table 100",
        )

    node.changes.append(replace)


def new_uplink(node: Zoo) -> None:
    """A second network card appears while the agent runs, and clients use its address.

    cilium/cilium#29917
    """

    def appear() -> None:
        second_network_card(node)

    node.changes.append(appear)


# Families


def ipv6_only(node: Zoo) -> None:
    """The cluster and the uplink have only IPv6.

    k3s-io/k3s#5621
    """
    node.families = ("v6",)
    node.ip(f"addr del {node.node.v4}/32 dev eth0")


def ipv4_only(node: Zoo) -> None:
    """The node's kernel has IPv6 disabled.

    kubernetes/kubernetes#137402
    """
    assert node.guest
    node.families = ("v4",)
    node.sysctl(node.node, "net/ipv6/conf/all/disable_ipv6=1", "net/ipv6/conf/default/disable_ipv6=1")


def broken_ipv6(node: Zoo) -> None:
    """The cluster has both families, but the network drops all packets of IPv6.

    kubernetes/kubernetes#133694
    """
    for device in ("node", "outside", "node-2"):
        node.router.run(["ip", "-6", "rule", "add", "iif", device, "blackhole"])
    node.expect("silent", "outside * * * v6", "* * there|second * v6", "guest|node|pod * away * v6")


# Firewalls


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


def marks_of_cni(node: Zoo) -> None:
    """Chains of the network plugin at kube-proxy's priority and after it replace all bits of the mark.

    aws/amazon-vpc-cni-k8s#3872
    """
    for word, priority in itertools.product(("ip", "ip6"), (-100, -90)):
        node.chain(
            f"{word} cni{-priority}", f"nat hook prerouting priority {priority}", "meta mark set ct mark"
        )


def closed_before_nat(node: Zoo) -> None:
    """A firewall closes all NodePorts for the uplink in a chain before NAT.

    siderolabs/talos#10437
    """
    closed = 'iifname "eth0" meta l4proto { tcp, udp } th dport 30100-30104 drop'
    node.chain("inet early", "filter hook prerouting priority raw", closed)
    node.expect("silent", "outside NodePort * * *")


def closed_at_the_device(node: Zoo) -> None:
    """A firewall closes all NodePorts at the uplink's netdev ingress hook.

    siderolabs/talos#10437
    """
    closed = "meta l4proto { tcp, udp } th dport 30100-30104 drop"
    node.chain("netdev early", 'filter hook ingress device "eth0" priority 0', closed)
    node.expect("silent", "outside NodePort * * *")


SITUATIONS: dict[str, Situation] = {
    each.__name__: each
    for each in (
        plain,
        routed_guest,
        virtual_machine,
        lxc_on_the_uplink,
        macvlan,
        nspawn,
        nested_cluster,
        host_network_pod,
        vpn_pod,
        multus_pod,
        pods_on_a_bridge,
        on_link_balancer,
        servicelb_own,
        servicelb_other,
        dns_cache,
        vrrp,
        dhcp,
        nat64_client,
        bound_source,
        two_subnets,
        ula_and_global,
        address_on_loopback,
        unnumbered,
        bridge_uplink,
        second_network_card,
        several_paths,
        asymmetric,
        pods_by_second_uplink,
        tun_pod_network,
        vxlan_pod_network,
        mtu_1280,
        mtu_9000,
        renamed_uplink,
        recreated_uplink,
        new_uplink,
        ipv6_only,
        ipv4_only,
        broken_ipv6,
        docker_drops,
        marks_of_cni,
        closed_before_nat,
        closed_at_the_device,
    )
}
