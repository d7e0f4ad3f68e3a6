"""A backend attaches its classifiers to devices, reads them back, replaces and removes them."""

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.attachments import TcFilters, TcxLinks
from ebpfproxy.backends.ebpf.backend import EbpfBackend
from ebpfproxy.backends.ebpf.devices.filters import DeviceTable
from ebpfproxy.backends.ebpf.entries import DeviceEntry, DeviceKey
from ebpfproxy.backends.ebpf.hooks import ON_DEMAND
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.errors import TableFull, Unsupported
from ebpfproxy.linux.bpf import tc, tcx
from ebpfproxy.linux.bpf.bpf import Map, Program
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netlink import iproute, links
from ebpfproxy.model.address import Family, unspecified
from ebpfproxy.plan.service_plan import DeviceRole, NodePlan
from tests.kernel.device_table.plane import (
    CLSACT_ONLY,
    EMPTY_PLAN,
    SCHED_CLS,
    TCX_ONLY,
    U32,
    bring,
    device,
    in_step,
    pinned,
    plan,
    programs,
    put,
    running,
    take_off,
)
from tests.support.bpf_place import HASH, BpfPlace, bpf_place, create_map, load_program
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize(
    ("role", "layer3", "expected"),
    [
        (DeviceRole.UPLINK, False, ("from_any", "to_any")),
        (DeviceRole.TUNNEL, True, ("from_any_l3", "to_any_l3")),
        (DeviceRole.POD, False, ("from_any", "to_any")),
    ],
)
def test_each_kind_of_device_has_its_own_programs(
    backend: EbpfBackend, place: BpfPlace, role: DeviceRole, layer3: bool, expected: tuple[str, str]
) -> None:
    assert not bring(backend, NodePlan(devices=(device("net", role, layer3),)))
    assert programs("net") == pinned(place.bpffs, *expected)
    assert programs("pod") == (None, None)


def test_programs_for_devices_without_a_link_layer_are_loaded_when_one_is_used(
    settings: EbpfSettings, node: Namespace
) -> None:
    with bpf_place() as fresh:
        own = dataclasses.replace(settings, bpffs_root=fresh.bpffs)
        with running(own) as backend:
            assert not bring(backend, plan("net"))
            assert on_demand(fresh) == set()
            tunnel = NodePlan(devices=(device("net"), device("pod", DeviceRole.TUNNEL, True)))
            assert not bring(backend, tunnel)
            assert on_demand(fresh) == {"from_any_l3", "to_any_l3"}
            assert in_step(backend, tunnel)
            assert programs("net") == pinned(fresh.bpffs, "from_any", "to_any")
            attached = programs("pod")
            assert attached == pinned(fresh.bpffs, "from_any_l3", "to_any_l3")
        with running(own) as restarted:
            assert in_step(restarted, tunnel)
            assert programs("pod") == attached
            assert not bring(restarted, EMPTY_PLAN)


def on_demand(place: BpfPlace) -> set[str]:
    return {path.name for path in place.bpffs.glob("programs-*/*") if path.name in ON_DEMAND}


def test_a_generation_check_reads_only_devices_with_programs(
    backend: EbpfBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[int] = set()

    def recorded(real: Callable[..., object]) -> Callable[..., object]:
        def running_at(table: object, ifindex: int, side: Side) -> object:
            read.add(ifindex)
            return real(table, ifindex, side)

        return running_at

    assert not bring(backend, plan("net"))
    for way in (TcFilters, TcxLinks):
        monkeypatch.setattr(way, "running", recorded(way.running))
    before = backend.generation()
    assert read == {socket.if_nametoindex("net")}
    backend.read()
    assert read == {ifindex for ifindex, _ in socket.if_nameindex()}
    assert backend.generation() == before


def test_loopback_has_a_program_only_at_egress(backend: EbpfBackend, place: BpfPlace) -> None:
    assert not bring(backend, plan("lo"))
    assert not bring(backend, NodePlan(devices=(device("lo", DeviceRole.LOOPBACK),)))
    assert programs("lo") == (None, *pinned(place.bpffs, "to_any"))


def test_a_removed_program_is_restored_by_the_next_verification(
    backend: EbpfBackend, place: BpfPlace
) -> None:
    bring(backend, plan("net", "pod"))
    before = programs("net")
    take_off(place.bpffs, "net", Side.EGRESS)
    assert not in_step(backend, plan("net", "pod"))
    assert not bring(backend, plan("net", "pod"))
    assert in_step(backend, plan("net", "pod"))
    assert programs("net") == before


@pytest.mark.parametrize("wanted", [True, False])
def test_a_program_with_other_code_is_replaced_or_removed(
    backend: EbpfBackend, place: BpfPlace, wanted: bool
) -> None:
    node = plan("net") if wanted else EMPTY_PLAN
    bring(backend, node)
    previous = load_program(SCHED_CLS, 0)
    try:
        for side in Side:
            put(place.bpffs, "net", side, previous)
        assert not in_step(backend, node)
        assert not bring(backend, node)
        assert in_step(backend, node)
        assert previous.id not in programs("net")
        assert (None in programs("net")) is not wanted
    finally:
        previous.close()


def test_a_deleted_entry_of_the_device_map_is_written_again(backend: EbpfBackend, place: BpfPlace) -> None:
    bring(backend, plan("net"))
    with contextlib.closing(devices_map(place)) as devices:
        devices.delete(socket.if_nametoindex("net").to_bytes(4, "little"))
        assert not in_step(backend, plan("net"))
        assert not bring(backend, plan("net"))
        assert in_step(backend, plan("net"))


@pytest.mark.parametrize("moment", ["after the list", "between the sides"])
def test_a_device_that_disappears_while_it_is_read_is_no_drift(
    backend: EbpfBackend, node: Namespace, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The list of devices and the programs at each side are separate reads."""
    desired, ifindex = plan("net", "pod"), socket.if_nametoindex("pod")
    bring(backend, desired)
    assert in_step(backend, desired)
    if moment == "after the list":
        module, name = links, "names"
    else:
        module, name = (tcx, "programs") if tcx.is_supported() else (tc, "filters")
    read = getattr(module, name)

    def read_then_delete(*arguments: int) -> object:
        found = read(*arguments)
        if threading.current_thread() is not threading.main_thread():
            return found  # that of the pods' namespaces
        if arguments[:1] in ((), (ifindex,)) and iproute.exists(ifindex):
            node.ip("link delete pod")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, name, read_then_delete)
        assert in_step(backend, desired)
    assert "pod" not in links.names().values()


def devices_map(place: BpfPlace) -> Map:
    return Map.pinned((place.bpffs / "current").resolve() / "maps" / "devices")


# Other programs on the same device


def test_filters_of_other_programs_and_their_clsact_are_left_alone(
    backend: EbpfBackend, node: Namespace
) -> None:
    node.tc("qdisc add dev net clsact", f"filter add dev net ingress prio 7 protocol all {U32}")
    ifindex = socket.if_nametoindex("net")
    foreign = tc.filters(ifindex, Side.INGRESS)
    bring(backend, plan("net"))
    assert [each for each in tc.filters(ifindex, Side.INGRESS) if not each.is_own] == foreign
    node.tc("filter del dev net ingress prio 7")
    bring(backend, EMPTY_PLAN)
    assert tc.has_clsact(ifindex), "the clsact is foreign, though it is empty"


@CLSACT_ONLY
def test_the_own_clsact_is_removed_unless_another_program_uses_it(
    backend: EbpfBackend, node: Namespace
) -> None:
    bring(backend, plan("net", "pod"))
    node.tc(f"filter add dev pod egress prio 7 protocol all {U32}")
    bring(backend, EMPTY_PLAN)
    assert not tc.has_clsact(socket.if_nametoindex("net"))
    assert tc.has_clsact(socket.if_nametoindex("pod"))
    assert programs("pod") == (None, None)
    assert tc.filters(socket.if_nametoindex("pod"), Side.EGRESS)


@CLSACT_ONLY
def test_a_device_with_an_ingress_qdisc_is_rejected_and_others_are_served(
    backend: EbpfBackend, node: Namespace
) -> None:
    node.tc("qdisc add dev pod ingress")
    rejected = bring(backend, plan("net", "pod"))
    assert [(str(key), type(failure)) for key, failure in rejected.items()] == [("device pod", Unsupported)]
    assert None not in programs("net")
    assert programs("pod") == (None, None), "requests are not translated without their replies"


@TCX_ONLY
def test_links_need_no_clsact_and_work_beside_an_ingress_qdisc(backend: EbpfBackend, node: Namespace) -> None:
    node.tc("qdisc add dev pod ingress")
    assert not bring(backend, plan("net", "pod"))
    assert None not in programs("net") + programs("pod")
    assert not tc.has_clsact(socket.if_nametoindex("net"))


@pytest.mark.parametrize("wanted", [True, False])
@TCX_ONLY
def test_filters_of_a_previous_version_are_replaced_by_links_or_removed(
    settings: EbpfSettings, node: Namespace, wanted: bool
) -> None:
    """A previous version attached them before the kernel had tcx."""
    ifindex = socket.if_nametoindex("net")
    with running(settings) as backend, contextlib.closing(load_program(SCHED_CLS, 0)) as previous:
        for side in Side:
            tc.attach(ifindex, side, previous)
        assert programs("net") == (previous.id, previous.id)
        assert not in_step(backend, plan("net") if wanted else EMPTY_PLAN)
        assert not bring(backend, plan("net") if wanted else EMPTY_PLAN)
        assert in_step(backend, plan("net") if wanted else EMPTY_PLAN)
        assert [tc.program_id(ifindex, side) for side in Side] == [None, None]
        assert [bool(tcx.programs(ifindex, side)) for side in Side] == [wanted, wanted]
        bring(backend, EMPTY_PLAN)


class NoClassifiers:
    """See `Classifiers`."""

    def classifier(self, name: str) -> Program:
        raise AssertionError(name)

    def classifier_ids(self) -> dict[str, int]:
        return {}


def test_a_full_device_map_is_reported_with_the_flag_that_raises_its_size() -> None:
    with contextlib.closing(create_map(HASH, 4, abi.DEVICE.size, 1)) as small:
        entry = DeviceEntry(0, unspecified(Family.IPV4), unspecified(Family.IPV6), ())
        keys = [DeviceKey(number, f"n{number}") for number in (1, 2)]
        ((key, failure),) = DeviceTable(small, NoClassifiers()).fill(dict.fromkeys(keys, entry)).items()
    assert (key, type(failure)) == (keys[1], TableFull)
    assert failure.message == "device n2: map devices is full: it has room for 1 devices"
    assert "--tc-devices" in failure.hint
