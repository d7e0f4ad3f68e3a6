"""State of the complete node: its map entry, the reinjection veth pair, and hooks of a previous run."""

import contextlib
import dataclasses
import socket

import pytest

from ebpfproxy.backends.ebpf import abi, cleanup
from ebpfproxy.backends.ebpf.backend import EbpfBackend
from ebpfproxy.backends.ebpf.flows import collector
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.errors import NotFound, Rejected, Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import conntrack, geneve, reinjection
from ebpfproxy.model.address import Protocol, parse_address
from ebpfproxy.plan.service_plan import SocketLb
from tests.kernel.cluster import eventually
from tests.kernel.device_table.plane import (
    EMPTY_PLAN,
    OTHER_SIZES,
    bring,
    plan,
    programs,
    reject,
    running,
)
from tests.support.bpf_place import BpfPlace
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel


def node_entry(place: BpfPlace) -> tuple[int, int]:
    """The flags, and the index of the reinjection device."""
    with contextlib.closing(Map.pinned(place.bpffs / "current" / "maps" / "node")) as opened:
        _, flags, reinjection, *_ = abi.NODE.unpack(opened.lookup(bytes(4)) or b"")
    return flags, reinjection


def test_the_entry_of_the_node_is_repaired_when_it_is_read(backend: EbpfBackend, place: BpfPlace) -> None:
    with contextlib.closing(Map.pinned(place.bpffs / "current" / "maps" / "node")) as opened:
        before = opened.lookup(bytes(4))
        opened.update(bytes(4), bytes(abi.NODE.size))
        backend.read()
        assert opened.lookup(bytes(4)) == before
        assert any(before or b"")


def test_without_its_geneve_device_the_node_tunnels_nothing_and_announces_nothing(
    settings: EbpfSettings, node: Namespace, place: BpfPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has vanished, and cannot be created: another program has one of that name."""

    def tunnel_device() -> int:
        with contextlib.closing(Map.pinned(place.bpffs / "current" / "maps" / "node")) as opened:
            *_, device, _, _, _, _, _ = abi.NODE.unpack(opened.lookup(bytes(4)) or b"")
        return int(device)

    node.ip(f"link add {geneve.DEVICE} type bridge")
    monkeypatch.setattr(geneve, "ensure", lambda port, ifindex: 777)
    with running(dataclasses.replace(settings, dsr_port=geneve.PORT)) as backend:
        backend.read()
        assert (tunnel_device(), backend.dsr_port()) == (777, geneve.PORT)
        monkeypatch.undo()
        wanted = backend.render((), EMPTY_PLAN)
        backend.read()
        assert (tunnel_device(), backend.dsr_port()) == (0, 0)
        assert backend.render((), EMPTY_PLAN) == wanted
        monkeypatch.setattr(geneve, "ensure", lambda port, ifindex: ifindex)
        backend.read()
        assert (tunnel_device(), backend.dsr_port()) == (777, geneve.PORT)


def icmp_limits(place: BpfPlace) -> tuple[int, int]:
    """ICMP errors per second, and in a burst."""
    (layout,) = place.bpffs.glob("programs-*")
    with contextlib.closing(Map.pinned(layout / "maps" / "node")) as opened:
        *_, rate, burst, _, _, _, _, _, _ = abi.NODE.unpack(opened.lookup(bytes(4)) or b"")
    return rate, burst


def test_icmp_errors_are_limited_as_the_kernel_limits_its_own(
    backend: EbpfBackend, place: BpfPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a sysctl is absent or not a number, the kernel's default applies."""
    known = {"net/ipv4/icmp_msgs_per_sec": "7", "net/ipv4/icmp_msgs_burst": "3"}

    def read(name: str) -> str:
        if name not in known:
            raise NotFound(name)
        return known[name]

    monkeypatch.setattr(sysctl, "read", read)
    backend.read()
    assert icmp_limits(place) == (7, 3)
    known |= {"net/ipv4/icmp_msgs_per_sec": "0", "net/ipv4/icmp_msgs_burst": "many"}
    backend.read()
    assert icmp_limits(place) == (0, 50)
    known.clear()
    backend.read()
    assert icmp_limits(place) == (1000, 50)


def test_the_lookup_of_netfilter_flows_is_on_while_there_are_some(
    settings: EbpfSettings, node: Namespace, place: BpfPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conntrack does not have the learned flow, so that the first walk of the collector deletes it."""
    client, frontend, endpoint, this = (parse_address(f"192.0.2.{number}") for number in range(1, 5))
    ends = client, 4001, frontend, 53, endpoint, 5353, this, 4002
    flow = conntrack.Flow(Protocol.UDP, *ends, status=0, zone=0, reply_zone=0, mark=0, id=1)
    monkeypatch.setattr(conntrack, "masqueraded", lambda: iter([flow]))
    pods = abi.NODE_SOCKETS_OF_PODS
    with running(settings) as first:
        assert node_entry(place)[0] == pods
        bring(first, EMPTY_PLAN)
        assert node_entry(place)[0] == pods | abi.NODE_NETFILTER_FLOWS
        first.read()
        assert node_entry(place)[0] == pods | abi.NODE_NETFILTER_FLOWS
    with running(settings):
        assert node_entry(place)[0] == pods | abi.NODE_NETFILTER_FLOWS
    monkeypatch.setattr(collector, "_POLL", 0.01)
    monkeypatch.setattr(collector, "_SHORTEST", 0.01)
    with running(settings) as third:
        eventually(lambda: node_entry(place)[0] == pods, "the last flow is deleted")
        third.read()
        assert node_entry(place)[0] == pods


def test_pods_lose_the_socket_path_only_after_the_packet_path_is_ready(
    settings: EbpfSettings, node: Namespace, place: BpfPlace
) -> None:
    with running(settings) as first:
        bring(first, EMPTY_PLAN)
        assert node_entry(place) == (abi.NODE_SOCKETS_OF_PODS, 0)
    with running(dataclasses.replace(settings, socket_lb=SocketLb.HOST)) as second:
        assert node_entry(place)[0] == abi.NODE_SOCKETS_OF_PODS
        bring(second, plan("pod"))
        assert node_entry(place)[0] == 0
        assert None not in programs("pod")


def test_without_the_socket_path_there_is_a_reinjection_pair_and_no_hook(
    settings: EbpfSettings, node: Namespace, place: BpfPlace
) -> None:
    with running(settings) as first:
        bring(first, EMPTY_PLAN)
        assert list((place.bpffs / "links").iterdir())
    with running(dataclasses.replace(settings, socket_lb=SocketLb.OFF)) as second:
        assert list((place.bpffs / "links").iterdir()), "the hooks stay until their replacement works"
        assert not bring(second, EMPTY_PLAN)
        assert not list((place.bpffs / "links").iterdir())
        reinjection = socket.if_nametoindex("ebpfproxy0")
        assert node_entry(place) == (0, reinjection)
        node.ip("link del ebpfproxy0")
        second.read()
        assert node_entry(place) == (0, socket.if_nametoindex("ebpfproxy0"))
    with running(settings) as third:
        assert node_entry(place)[1] == socket.if_nametoindex("ebpfproxy0")
        assert not bring(third, EMPTY_PLAN)
        assert list((place.bpffs / "links").iterdir())
        assert node_entry(place) == (abi.NODE_SOCKETS_OF_PODS, 0)
        assert "ebpfproxy0" not in dict(socket.if_nameindex()).values()


def test_a_failed_reinjection_pair_prevents_a_start_but_no_sync(
    settings: EbpfSettings, node: Namespace, place: BpfPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = dataclasses.replace(settings, socket_lb=SocketLb.OFF)
    with running(off) as first:
        assert not bring(first, EMPTY_PLAN)
        before = node_entry(place)
        with contextlib.closing(Map.pinned(next(place.bpffs.glob("programs-*/maps")) / "node")) as opened:
            opened.update(bytes(4), bytes(abi.NODE.size))
        monkeypatch.setattr(reinjection, "ensure_pair", reject)
        assert not bring(first, plan("net"))
        assert None not in programs("net")
        assert node_entry(place) == before, "the other fields are repaired"
        bring(first, EMPTY_PLAN)
    with pytest.raises(Rejected, match="rejected once"):
        EbpfBackend(off).open()


def test_hooks_of_previous_programs_are_removed_without_the_socket_path(
    settings: EbpfSettings, node: Namespace
) -> None:
    with running(settings) as first:
        bring(first, EMPTY_PLAN)
    other = dataclasses.replace(settings, sizes=OTHER_SIZES, socket_lb=SocketLb.OFF)
    with running(other) as second:
        assert not bring(second, EMPTY_PLAN)
        assert not list((settings.bpffs_root / "links").iterdir())


def test_hooks_are_removed_also_on_kernels_without_links(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: object) -> None:
        raise Unsupported("no links")

    monkeypatch.setattr(cgroup, "attach_link", reject)
    cleanup.remove(settings.bpffs_root, settings.cgroup_root)  # the links of earlier tests
    with running(settings) as first:
        assert not bring(first, EMPTY_PLAN)
        assert all(attached(settings))
    other = dataclasses.replace(settings, sizes=OTHER_SIZES, socket_lb=SocketLb.OFF)
    with running(other) as second:
        assert not bring(second, EMPTY_PLAN)
        assert not any(attached(settings))


def attached(settings: EbpfSettings) -> list[list[int]]:
    """The ids of the programs at each hook."""
    return [cgroup.programs(settings.cgroup_root, hook.attach_type) for hook in SOCKET_HOOKS]


def test_a_device_that_disappears_is_no_change_by_another_program(
    backend: EbpfBackend, node: Namespace
) -> None:
    """Its pod was deleted, and the agent has not processed that yet. Regression: every deletion of a pod
    caused a read of everything, and a warning about drift of "device (gone)"."""
    node.ip("link add pod0 type veth peer name pod1")
    assert not bring(backend, plan("net", "pod0"))
    expected, generation = backend.read(), backend.generation()
    node.ip("link del pod0")
    assert backend.generation() == generation
    assert all(backend.check(expected))
    assert backend.read() == expected
    assert not bring(backend, plan("net"))
    assert backend.read() == {key: entry for key, entry in expected.items() if str(key) != "device pod0"}
