"""Masquerading at a device with several addresses: new flows get the source that the kernel selects."""

import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf import abi, features
from ebpfproxy.backends.ebpf.devices import source_addresses
from ebpfproxy.backends.ebpf.entries import SourceKey, render
from ebpfproxy.linux.netlink import links
from ebpfproxy.model.address import parse_address
from ebpfproxy.plan.devices import plan_devices
from ebpfproxy.plan.service_plan import DevicePlan, NodePlan
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, TARGETS, TCP, families, serve
from tests.support import build
from tests.support.bpf_place import bpf_place
from tests.support.build import CONTEXT
from tests.support.packet_path import DEVICES, REDIRECT, UNSPEC, PacketPath, packet_path
from tests.support.packets import V4, Places, become, ip, transport

pytestmark = pytest.mark.kernel

SECOND = {"v4": "10.244.2.200", "v6": "fd00:2::c8"}
"""The second address of the device `tunnel`, in the network of the endpoint."""
_U32_BYTES = 4


@pytest.fixture(scope="module", params=["by the kernel", "by the table"])
def either(request: pytest.FixtureRequest) -> Iterator[PacketPath]:
    """`by the table`: as on a kernel without BPF_FIB_LOOKUP_SRC."""
    name = features.FIB_LOOKUP_SRC.name
    by_table = request.param == "by the table"
    if not by_table and name not in features.present():
        pytest.skip("this kernel has no BPF_FIB_LOOKUP_SRC")
    with bpf_place() as place, packet_path(place, absent=[name] if by_table else ()) as made:
        yield made


@pytest.fixture
def path(either: PacketPath) -> Iterator[PacketPath]:
    """The device `tunnel` has the second addresses, and routes with IPv4's as the preferred source."""
    either.start_over()
    command(
        f"addr add {SECOND['v4']}/24 dev tunnel noprefixroute",
        f"addr add {SECOND['v6']}/64 dev tunnel nodad noprefixroute",
        f"route replace 10.244.2.0/24 dev tunnel src {SECOND['v4']}",
    )
    learn(either)
    yield either
    command(
        "route replace 10.244.2.0/24 dev tunnel",
        f"addr del {SECOND['v4']}/24 dev tunnel",
        f"addr del {SECOND['v6']}/64 dev tunnel",
    )
    empty(either)


def command(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def empty(path: PacketPath) -> None:
    for key, _ in list(path.maps[source_addresses.MAP].items()):
        path.maps[source_addresses.MAP].delete(key)


def learn(path: PacketPath) -> None:
    """Write what the agent plans for the devices as they are now."""
    empty(path)
    plans = plan_devices(links.read(), build.node(), CONTEXT, True, tuple(path.indices.values()))
    for key, entry in render((), NodePlan(devices=plans), ()).items():
        if isinstance(key, SourceKey):
            assert isinstance(entry, bytes)
            path.maps[source_addresses.MAP].update(source_addresses.pack(key), entry)
    for plan in plans:
        if plan.name in DEVICES:
            set_device(path, plan)


def set_device(path: PacketPath, plan: DevicePlan) -> None:
    side = DEVICES[plan.name]
    path.set_device(plan.name, side.v4, side.v6, abi.DEVICE_SOURCES if plan.sources else 0)


def second(at: Places) -> str:
    return SECOND["v4" if at is V4 else "v6"]


def test_only_the_device_with_several_addresses_needs_lookups(path: PacketPath) -> None:
    flagged = {
        name
        for name, index in path.indices.items()
        if abi.DEVICE.unpack(path.maps["devices"].lookup(index.to_bytes(_U32_BYTES, "little")) or b"")[2]
        & abi.DEVICE_SOURCES
    }
    assert flagged == {"tunnel"}


@families
def test_a_forwarded_packet_gets_the_source_of_the_route(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    request = ip(at.client, at.external) / transport(TCP, CLIENT_PORT, PORTS[TCP])
    outcome = path.forward(request, "net", "tunnel")
    assert outcome.verdict == UNSPEC
    assert outcome.raw == become(request, second(at), at.there, destination_port=TARGETS[TCP])
    reply = ip(at.external, at.client) / transport(TCP, PORTS[TCP], CLIENT_PORT, flags="SA")
    answer = become(reply, at.there, second(at), source_port=TARGETS[TCP])
    assert path.forward(answer, "tunnel", "net").raw == bytes(reply)


@families
def test_a_packet_that_bypasses_the_stack_gets_the_source_of_the_route(path: PacketPath, at: Places) -> None:
    path.set_node(abi.NODE_REDIRECT)
    serve(path, at, at.there)
    request = ip(at.client, at.external) / transport(TCP, CLIENT_PORT, PORTS[TCP])
    outcome = path.ingress(request)
    assert outcome.verdict == REDIRECT
    (flow,) = path.flows().values()
    assert flow.value["masquerade"] == parse_address(second(at))


@families
def test_a_host_originated_packet_gets_the_source_of_the_route(path: PacketPath, at: Places) -> None:
    path.set_node(inner=path.indices["net"])
    serve(path, at, at.there)
    request = ip(at.node, at.cluster) / transport(TCP, CLIENT_PORT, PORTS[TCP])
    outcome = path.egress(request, came_in="")
    assert outcome.verdict == REDIRECT
    assert outcome.raw == become(request, second(at), at.there, destination_port=TARGETS[TCP])


def test_a_flow_keeps_its_address_when_the_route_changes(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    request = ip(V4.client, V4.external) / transport(TCP, CLIENT_PORT, PORTS[TCP])
    translated = path.forward(request, "net", "tunnel").raw
    command("route replace 10.244.2.0/24 dev tunnel src 10.244.1.2")
    learn(path)
    assert path.forward(request, "net", "tunnel").raw == translated
    other = ip(V4.client, V4.external) / transport(TCP, CLIENT_PORT + 1, PORTS[TCP])
    expected = become(other, V4.masquerade, V4.there, destination_port=TARGETS[TCP])
    assert path.forward(other, "net", "tunnel").raw == expected


@families
def test_a_device_without_the_flag_has_its_own_address(path: PacketPath, at: Places) -> None:
    path.set_device("tunnel", DEVICES["tunnel"].v4, DEVICES["tunnel"].v6)
    serve(path, at, at.there)
    request = ip(at.client, at.external) / transport(TCP, CLIENT_PORT, PORTS[TCP])
    outcome = path.forward(request, "net", "tunnel")
    assert outcome.raw == become(request, at.masquerade, at.there, destination_port=TARGETS[TCP])


def test_a_gateway_selects_the_address_in_its_network(path: PacketPath) -> None:
    """Without a preferred source: the address that netfilter selects, too."""
    command("addr add 10.245.0.2/24 dev tunnel", "route replace 10.244.2.0/24 via 10.245.0.1 dev tunnel")
    learn(path)
    try:
        serve(path, V4, V4.there)
        request = ip(V4.client, V4.external) / transport(TCP, CLIENT_PORT, PORTS[TCP])
        outcome = path.forward(request, "net", "tunnel")
        assert outcome.raw == become(request, "10.245.0.2", V4.there, destination_port=TARGETS[TCP])
    finally:
        command("route replace 10.244.2.0/24 dev tunnel", "addr del 10.245.0.2/24 dev tunnel")
