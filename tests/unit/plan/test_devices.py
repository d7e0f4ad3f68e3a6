"""Which devices get programs, in which role, and with which masquerade addresses."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.model.address import format_address, network, parse_address, parse_network
from ebpfproxy.model.device import ETHERNET, LOOPBACK, Device
from ebpfproxy.plan.devices import flowtable_devices, plan_devices
from ebpfproxy.plan.service_plan import DevicePlan, DeviceRole, PlanContext, SocketLb
from tests.support import build
from tests.support.build import CONTEXT

NODE = build.node(addresses=["192.0.2.10", "2001:db8::10"])
UPLINK, TUNNEL, POD, GUEST = DeviceRole.UPLINK, DeviceRole.TUNNEL, DeviceRole.POD, DeviceRole.GUEST
NO_HEADER, IPIP = 65534, 768  # ARPHRD_NONE, ARPHRD_TUNNEL

LO = Device(1, "lo", "", LOOPBACK, up=True)
ETH0 = Device(2, "eth0", "", ETHERNET, up=True, addresses=(parse_address("192.0.2.10"),), default_route=True)
VETH = Device(9, "veth1", "veth", ETHERNET, up=True)


def device(kind: str, *addresses: str, **fields: Any) -> Device:
    """The device under test: x0 with ifindex 7."""
    made = Device(7, "x0", kind, ETHERNET, True, addresses=tuple(map(parse_address, addresses)))
    return made._replace(**fields)


def using(socket_lb: SocketLb = SocketLb.ON, *patterns: str) -> PlanContext:
    return dataclasses.replace(CONTEXT, socket_lb=socket_lb, device_patterns=patterns)


HOST = using(SocketLb.HOST)


def roles(
    *devices: Device,
    context: PlanContext = CONTEXT,
    pods: bool = False,
    bypassing: Collection[int] = (),
) -> dict[str, DeviceRole]:
    return {each.name: each.role for each in plan_devices(devices, NODE, context, pods, bypassing)}


POD_VETH = VETH._replace(peer_elsewhere=True)


def test_devices_of_the_flowtable_match_a_pattern_and_are_not_loopback() -> None:
    down = VETH._replace(up=False)
    found = flowtable_devices((down, ETH0, LO), ("veth[0-9]", "l*"))
    assert found == ((VETH.ifindex, "veth1"),)
    assert flowtable_devices((down, ETH0, LO), ("*",)) == tuple(
        sorted([(ETH0.ifindex, "eth0"), (VETH.ifindex, "veth1")])
    )
    assert flowtable_devices((ETH0,), ()) == ()


def test_the_device_of_a_namespace_gets_programs_unless_the_socket_path_serves_it() -> None:
    def names(*by_socket: int) -> set[str]:
        found = plan_devices((ETH0, POD_VETH), NODE, CONTEXT, False, (), by_socket=by_socket)
        return {each.name for each in found}

    assert names() == {"eth0", "veth1"}
    assert names(POD_VETH.ifindex) == {"eth0"}


def test_a_guest_on_a_bridge_with_an_uplink_gets_no_programs_at_its_port() -> None:
    """Its frames to its router are only forwarded by the bridge."""
    port = ETH0._replace(addresses=(), default_route=False, master=5, master_kind="bridge")
    bridge = ETH0._replace(ifindex=5, name="br0", kind="bridge")
    guest = POD_VETH._replace(master=5, master_kind="bridge")
    assert roles(port, bridge, guest) == {"br0": UPLINK}
    alone = bridge._replace(addresses=(), default_route=False)
    assert roles(ETH0, alone, guest) == {"eth0": UPLINK, "veth1": POD}

    known = plan_devices((port, bridge, guest), NODE, CONTEXT, True, (), of_pods=(guest.ifindex,))
    assert {each.name: each.role for each in known} == {"br0": UPLINK, "veth1": POD}


@pytest.mark.parametrize(
    ("address", "length", "of_pods", "wanted"),
    [
        ("203.0.113.7", 96 + 24, (), UPLINK),  # kind or LXD with two networks
        ("2001:db8:2::7", 64, (), UPLINK),
        ("203.0.113.7", 96 + 24, (9,), POD),  # a network for each pod, of unknown podCIDRs
        ("10.1.0.1", 96 + 24, (), POD),  # within the podCIDRs
        ("203.0.113.1", 96 + 32, (), POD),  # the gateway address of the plugin ptp
        ("169.254.1.1", 96 + 31, (), POD),
    ],
)
def test_a_pair_with_a_network_of_its_own_is_an_uplink(
    address: str, length: int, of_pods: tuple[int, ...], wanted: DeviceRole
) -> None:
    veth = POD_VETH._replace(
        addresses=(parse_address(address),), networks=(network(parse_address(address), length),)
    )
    node = dataclasses.replace(NODE, pod_cidrs=(parse_network("10.1.0.0/16"),))
    plans = plan_devices((ETH0, veth), node, CONTEXT, False, (), of_pods=of_pods)
    assert {each.name: each.role for each in plans} == {"eth0": UPLINK, "veth1": wanted}


def role(one: Device, *others: Device, context: PlanContext = CONTEXT) -> DeviceRole | None:
    return roles(one, *others, context=context).get(one.name)


# Loopback


def test_loopback_gets_programs_once_packets_of_the_node_take_the_packet_path() -> None:
    assert role(LO) is None
    assert roles(LO, bypassing=[LO.ifindex]) == {"lo": DeviceRole.LOOPBACK}


# Uplinks


@pytest.mark.parametrize(
    "uplink",
    [
        device(""),
        device("", up=False),
        device("veth", default_route=True),
        device("veth", "192.0.2.10"),
        device("macvlan", "2001:db8::10"),
        device("bridge", "192.0.2.10"),
        device("bridge", default_route=True),
        device("bond", "198.51.100.1"),
        device("vlan", "198.51.100.1"),
        device("macvlan", "2001:db8:1::1"),
        device("openvswitch", "198.51.100.1"),
        device("tun", "198.51.100.1", link_type=NO_HEADER),
        device("ppp", link_type=512, default_route=True),
        device("", master=5, master_kind="vrf"),
    ],
    ids=str,
)
def test_a_device_that_leads_to_the_nodes_network_is_an_uplink_up_or_down(uplink: Device) -> None:
    assert role(uplink) is UPLINK


@pytest.mark.parametrize(
    "other",
    [
        device("", link_type=IPIP),
        device("", master=5, master_kind="bond"),
        device("", "192.0.2.10", master=5, master_kind="team"),
        device("", default_route=True, master=5, master_kind="bridge"),
        device("", master=5, master_kind="openvswitch"),
        device("bond"),
        device("vlan"),
        device("macvlan"),
        device("bridge"),
        device("bridge", "10.1.0.1"),
        device("dummy", "192.0.2.10"),
        device("ifb"),
        device("vrf", "198.51.100.1", default_route=True),
        device("tun", link_type=NO_HEADER),
    ],
    ids=str,
)
def test_a_device_without_role_or_with_a_master_gets_no_programs(other: Device) -> None:
    assert role(other) is None
    assert role(other, context=HOST) is None


def test_a_veth_with_the_nodes_address_is_no_uplink_while_the_node_is_unknown() -> None:
    veth = device("veth", "192.0.2.10")
    assert plan_devices([veth], None, CONTEXT, False, ()) == ()
    (plan,) = plan_devices([veth], None, HOST, False, ())
    assert plan.role is POD


def test_the_reinjection_pair_gets_no_programs_even_if_a_pattern_matches() -> None:
    pair = [device("veth", ifindex=7 + number, name=f"ebpfproxy{number}") for number in (0, 1)]
    assert roles(*pair, context=HOST) == {}
    assert roles(*pair, context=using(SocketLb.OFF, "*")) == {}


def test_the_geneve_device_of_the_agent_gets_no_programs_by_the_plan() -> None:
    """The backend attaches its own program. Another Geneve device is a tunnel."""
    own = device("geneve", ifindex=7, name="ebpfproxy-gnv")
    assert roles(own, context=HOST) == {}
    assert roles(own, context=using(SocketLb.OFF, "*")) == {}
    assert roles(device("geneve", ifindex=7, name="genev_sys_6081"), context=HOST)


def test_with_pattern_none_no_device_gets_programs_not_even_loopback() -> None:
    for socket_lb in SocketLb:
        assert roles(LO, ETH0, VETH, context=using(socket_lb, "none"), pods=True, bypassing={9}) == {}


# Tunnels


@pytest.mark.parametrize(
    "kind",
    ["vxlan", "geneve", "ipip", "sit", "ip6tnl", "gre", "gretap", "ip6gre", "ip6gretap", "wireguard"],
)
def test_a_tunnel_that_is_up_gets_programs_with_or_without_addresses(kind: str) -> None:
    assert role(device(kind)) is TUNNEL
    assert role(device(kind, "198.51.100.1", default_route=True)) is TUNNEL


def test_a_tunnel_that_is_down_gets_no_programs() -> None:
    """Every network namespace has tunl0 once the module is loaded. Calico uses it; others do not."""
    assert role(device("ipip", name="tunl0", up=False)) is None


# Pods


def test_a_pods_veth_gets_no_programs_while_the_socket_path_serves_pods() -> None:
    assert roles(ETH0, VETH) == {"eth0": UPLINK}


@pytest.mark.parametrize("socket_lb", [SocketLb.HOST, SocketLb.OFF])
def test_a_pods_veth_gets_programs_if_sockets_of_pods_are_not_load_balanced(socket_lb: SocketLb) -> None:
    assert role(VETH, context=using(socket_lb)) is POD


def test_all_pods_veths_get_programs_if_a_service_needs_their_packets() -> None:
    other = VETH._replace(ifindex=10, name="veth2")
    assert roles(VETH, other, pods=True) == {"veth1": POD, "veth2": POD}


def test_a_pods_veth_gets_programs_if_packets_are_redirected() -> None:
    assert role(VETH, context=dataclasses.replace(CONTEXT, redirect=True)) is POD


@pytest.mark.parametrize("peer_elsewhere", [True, False])
def test_peer_elsewhere_is_set_for_pods_and_not_for_uplinks(peer_elsewhere: bool) -> None:
    """An uplink may be one end of a pair, too."""
    uplink, pod = (each._replace(kind="veth", peer_elsewhere=peer_elsewhere) for each in (ETH0, VETH))
    plans = plan_devices((uplink, pod), NODE, HOST, False, ())
    assert {each.name: each.peer_elsewhere for each in plans} == {"eth0": False, "veth1": peer_elsewhere}


def test_if_a_bridge_is_bypassing_all_its_pod_ports_get_programs() -> None:
    """Packets that enter through a port have the bridge as their ingress device."""
    bridge = Device(20, "cni0", "bridge", ETHERNET, True)
    ports = [Device(i, f"veth{i}", "veth", ETHERNET, True, 20, "bridge") for i in (21, 22)]
    assert roles(ETH0, bridge, *ports, bypassing={20}) == {"eth0": UPLINK, "veth21": POD, "veth22": POD}
    assert roles(ETH0, bridge, *ports, bypassing={21}) == {"eth0": UPLINK, "veth21": POD}


def test_only_the_veth_of_a_bypassing_pod_gets_programs() -> None:
    other = VETH._replace(ifindex=10, name="veth2")
    assert roles(ETH0, VETH, other, bypassing={10, 2, 99}) == {"eth0": UPLINK, "veth2": POD}


def test_a_tap_device_always_gets_programs() -> None:
    tap = device("tun", master=5, master_kind="bridge")
    assert role(tap) is POD
    assert role(device("tun", "198.51.100.1")) is POD
    address = parse_address("198.51.100.1")
    assert role(device("tun", "198.51.100.1", networks=(network(address, 96 + 24),))) is UPLINK


def test_a_pods_veth_with_the_gateways_address_is_no_uplink() -> None:
    """The CNI plugin ptp puts the gateway's address on every veth."""
    assert role(device("veth", "10.1.0.1"), context=HOST) is POD


# Bridges


def bridge(*addresses: str) -> Device:
    return device("bridge", *addresses, ifindex=5, name="br0")


def part(kind: str, ifindex: int = 6) -> Device:
    return device(kind, ifindex=ifindex, name=f"port{ifindex}", master=5, master_kind="bridge")


def test_a_bridge_of_pods_gets_no_programs_but_its_ports_do() -> None:
    assert roles(bridge("10.1.0.1"), part("veth"), context=HOST) == {"port6": POD}
    assert roles(bridge("10.1.0.1"), part("veth"), part("vxlan", 7), context=HOST) == {
        "port6": POD,
        "port7": TUNNEL,
    }


def test_a_bridge_with_a_hardware_port_is_the_uplink() -> None:
    assert roles(bridge("198.51.100.1"), part("")) == {"br0": UPLINK}
    assert roles(bridge("198.51.100.1"), part("bond"), part("tun", 7)) == {"br0": UPLINK}


def test_a_bridge_without_address_gets_no_programs() -> None:
    assert roles(bridge(), part("")) == {}


def test_a_guest_at_a_bridge_with_the_nodes_address_is_a_machine_of_that_network() -> None:
    assert roles(bridge("192.0.2.10"), part(""), part("tun", 7)) == {"br0": UPLINK}


@pytest.mark.parametrize("kind", ["veth", "tun"])
@pytest.mark.parametrize(
    ("network_of_bridge", "pod_cidrs", "of_pods", "wanted"),
    [
        ("172.17.0.1/16", ["10.1.0.0/24"], (), GUEST),
        ("172.17.0.1/16", [], (9,), GUEST),  # without podCIDRs: a pod elsewhere is known
        ("172.17.0.1/16", [], (), POD),  # without any facts
        ("172.17.0.1/16", ["10.1.0.0/24"], (8,), POD),  # a known pod at the bridge
        ("10.1.0.1/24", ["10.1.0.0/24"], (), POD),
        ("10.1.0.1/16", ["10.1.7.0/24"], (), POD),  # one bridge network for all nodes
        ("172.17.0.1/32", ["10.1.0.0/24"], (), POD),
        ("", ["10.1.0.0/24"], (), POD),
    ],
)
def test_a_bridge_leads_to_guests_only_if_that_is_known(
    kind: str, network_of_bridge: str, pod_cidrs: list[str], of_pods: tuple[int, ...], wanted: DeviceRole
) -> None:
    address, _, length = network_of_bridge.partition("/")
    made = bridge(address) if address else bridge()
    if address:
        made = made._replace(networks=(network(parse_address(address), 96 + int(length)),))
    guest, pod = (part(kind, each)._replace(peer_elsewhere=kind == "veth") for each in (7, 8))
    elsewhere = POD_VETH
    node = dataclasses.replace(NODE, pod_cidrs=tuple(map(parse_network, pod_cidrs)))
    devices = (ETH0, made, guest, pod, elsewhere)
    plans = plan_devices(devices, node, CONTEXT, False, (), of_pods=of_pods)
    found = {each.name: each.role for each in plans}
    assert found == {"eth0": UPLINK, "port7": wanted, "port8": wanted, "veth1": POD}


# Loopback


def test_loopback_gets_programs_if_a_service_needs_packets_of_the_node() -> None:
    plans = plan_devices((LO, ETH0), NODE, using(SocketLb.ON), True, (), of_node=True)
    assert [(each.name, each.role) for each in plans] == [("lo", DeviceRole.LOOPBACK), ("eth0", UPLINK)]


def test_loopback_gets_programs_only_without_socket_load_balancing() -> None:
    assert roles(LO, ETH0, context=using(SocketLb.OFF)) == {"lo": DeviceRole.LOOPBACK, "eth0": UPLINK}
    assert roles(LO, ETH0, context=HOST) == roles(LO, ETH0) == {"eth0": UPLINK}


# Patterns


def test_with_patterns_exactly_the_matching_devices_get_programs() -> None:
    devices = ETH0, VETH, device("vxlan"), device("tun", ifindex=8, name="tap0")
    assert roles(*devices, context=using(SocketLb.ON, "veth*", "x?")) == {"x0": TUNNEL, "veth1": POD}
    assert roles(*devices, context=using(SocketLb.HOST, "eth[12]"), pods=True, bypassing={9}) == {}


def test_a_matching_device_without_role_is_an_uplink() -> None:
    assert role(device("dummy"), context=using(SocketLb.ON, "x0")) is UPLINK


@pytest.mark.parametrize("pattern", ["*", "lo", "eth0"])
def test_patterns_do_not_apply_to_loopback(pattern: str) -> None:
    assert "lo" not in roles(LO, ETH0, context=using(SocketLb.ON, pattern))
    assert "lo" in roles(LO, ETH0, context=using(SocketLb.OFF, pattern))


def test_patterns_are_case_sensitive() -> None:
    assert roles(ETH0, context=using(SocketLb.ON, "ETH*")) == {}


# Device plans


def masquerade(one: Device, *others: Device) -> tuple[str | None, str | None]:
    plans = plan_devices([one, *others], NODE, HOST, False, ())
    (plan,) = [each for each in plans if each.ifindex == one.ifindex]
    return tuple(each and format_address(each) for each in (plan.v4, plan.v6))  # type: ignore[return-value]


def test_a_device_masquerades_with_its_first_address_of_each_family() -> None:
    eth = device("", "198.51.100.1", "198.51.100.2", "2001:db8:1::1", "2001:db8:1::2")
    assert masquerade(eth, ETH0) == ("198.51.100.1", "2001:db8:1::1")


def test_the_masquerade_address_of_each_family_is_found_separately() -> None:
    six = Device(3, "dummy0", "dummy", ETHERNET, True, addresses=(parse_address("2001:db8::10"),))
    assert masquerade(device("", "198.51.100.1"), ETH0, six) == ("198.51.100.1", "2001:db8::10")


def test_a_port_masquerades_with_the_address_of_its_bridge() -> None:
    assert masquerade(part("veth"), bridge("10.1.0.1"), ETH0) == ("10.1.0.1", None)


def test_a_device_without_address_masquerades_with_the_nodes_local_address() -> None:
    assert masquerade(VETH, ETH0) == ("192.0.2.10", None)


def test_without_a_local_node_address_the_default_routes_device_provides_it() -> None:
    other = ETH0._replace(addresses=tuple(map(parse_address, ("198.51.100.1", "2001:db8:1::1"))))
    unrouted = device("", "203.0.113.1", default_route=False, ifindex=1)
    assert masquerade(VETH, unrouted, other) == ("198.51.100.1", "2001:db8:1::1")


def test_a_node_without_addresses_has_no_masquerade_address() -> None:
    assert masquerade(VETH) == (None, None)


def test_layer3_is_set_for_devices_without_ethernet_header() -> None:
    devices = LO, ETH0, device("wireguard", link_type=NO_HEADER)
    plans = plan_devices(devices, NODE, using(SocketLb.OFF), False, ())
    assert [(each.name, each.layer3) for each in plans] == [("lo", False), ("eth0", False), ("x0", True)]


_ADDRESSES = st.sampled_from(["192.0.2.10", "198.51.100.1", "10.1.0.1", "2001:db8::10", "fd00::1"])
_DEVICES = st.builds(
    lambda kind, link_type, up, master, addresses, default_route: device(
        kind, *addresses, link_type=link_type, up=up, master=master, default_route=default_route
    ),
    st.sampled_from(["", "veth", "tun", "bridge", "bond", "vxlan", "dummy", "vlan"]),
    st.sampled_from([ETHERNET, LOOPBACK, NO_HEADER]),
    st.booleans(),
    st.integers(0, 4),
    st.lists(_ADDRESSES, max_size=2, unique=True),
    st.booleans(),
)


@st.composite
def _hosts(draw: st.DrawFn) -> Sequence[Device]:
    """Devices with ifindexes from 1, some of them ports of others."""
    drawn = draw(st.lists(_DEVICES, max_size=6))
    kinds = {number: each.kind for number, each in enumerate(drawn, 1)}
    return [
        each._replace(ifindex=number, name=f"x{number}", master_kind=kinds.get(each.master, ""))
        for number, each in enumerate(drawn, 1)
    ]


@given(
    _hosts(),
    st.randoms(),
    st.sampled_from(SocketLb),
    st.sampled_from([(), ("x[1-3]",)]),
    st.booleans(),
    st.sets(st.integers(1, 6)),
)
def test_the_order_of_devices_does_not_matter(
    devices: Sequence[Device],
    random: Any,
    socket_lb: SocketLb,
    patterns: tuple[str, ...],
    pods: bool,
    bypassing: set[int],
) -> None:
    context = using(socket_lb, *patterns)
    shuffled = list(devices)
    random.shuffle(shuffled)

    def planned(some: Sequence[Device]) -> tuple[DevicePlan, ...]:
        return plan_devices(some, NODE, context, pods, bypassing)

    plans = planned(devices)
    assert planned(shuffled) == plans
    assert [each.ifindex for each in plans] == sorted({each.ifindex for each in plans})


@pytest.mark.parametrize(
    ("master_kind", "bridge", "switched"),
    [("bridge", b"bridge", False), ("openvswitch", b"", True), ("vrf", b"", False), ("", b"", False)],
)
def test_the_plan_of_a_port_has_the_address_of_its_bridge(
    master_kind: str, bridge: bytes, switched: bool
) -> None:
    master = device(master_kind, ifindex=5, name="m0", mac=b"bridge")
    port = POD_VETH._replace(master=5 if master_kind else 0, master_kind=master_kind)
    plans = {each.name: each for each in plan_devices((master, port), NODE, CONTEXT, True, ())}
    assert (plans[port.name].bridge, plans[port.name].switched) == (bridge, switched)
