"""Our classifiers on devices, as a dataplane puts them there, reads them back, replaces and removes them."""

import contextlib
import dataclasses
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ebpfproxy.dataplanes.delta import diff
from ebpfproxy.dataplanes.ebpf import abi, removal
from ebpfproxy.dataplanes.ebpf.dataplane import EbpfDataplane
from ebpfproxy.dataplanes.ebpf.entries import Entry, Key
from ebpfproxy.dataplanes.ebpf.hooks import CLASSIFIERS, SOCKET_HOOKS
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.dataplanes.ebpf.settings import EbpfSettings
from ebpfproxy.errors import AlreadyExists, KernelError, Unsupported
from ebpfproxy.kernel import cgroup, tc
from ebpfproxy.kernel.bpf import Map, Program
from ebpfproxy.kernel.tc import Side
from ebpfproxy.model.address import parse_address
from ebpfproxy.plan.service_plan import DevicePlan, DeviceRole, NodePlan, SocketLb
from tests.support.bpf_place import BpfPlace, bpf_place, load_program
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

SCHED_CLS = 3
SIZES = MapSizes(8, 64, 64, 16, 16, flows=16, source_ranges=16)
OTHER_SIZES = dataclasses.replace(SIZES, flows=32)
NOBODY = NodePlan()
U32 = "u32 match u32 0 0 flowid 1:1"  # a filter as others have them


@pytest.fixture(scope="module", autouse=True)
def _simple_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the programs do is of no matter here, and ours take seconds to compile."""
    sources = tmp_path_factory.mktemp("sources") / "bpf"
    shutil.copytree(abi.source_directory(), sources)
    passing = "(struct __sk_buff *skb) { return -1; }"
    (sources / "tc.c").write_text("".join(f"int {name}{passing}\n" for name in CLASSIFIERS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(abi, "source_directory", lambda: sources)
        yield


@pytest.fixture(scope="module")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture
def node() -> Iterator[Namespace]:
    """A namespace with the veths net and pod; the calling thread is in it."""
    with namespace("devices") as made:
        made.ip("link set lo up", "link add net type veth", "link add pod type veth")
        with made.entered():
            yield made


@pytest.fixture
def settings(place: BpfPlace) -> EbpfSettings:
    return EbpfSettings(place.cgroup, place.bpffs, sizes=SIZES)


@contextlib.contextmanager
def running(settings: EbpfSettings) -> Iterator[EbpfDataplane]:
    dataplane = EbpfDataplane(settings)
    dataplane.open()
    try:
        yield dataplane
    finally:
        dataplane.close()


@pytest.fixture
def dataplane(settings: EbpfSettings, node: Namespace) -> Iterator[EbpfDataplane]:
    """Open, with nothing on any device, whatever the test before has left in the maps."""
    with running(settings) as opened:
        assert not bring(opened, NOBODY)
        yield opened


def device(name: str, role: DeviceRole = DeviceRole.UPLINK, layer3: bool = False) -> DevicePlan:
    return DevicePlan(socket.if_nametoindex(name), name, role, layer3, parse_address("192.0.2.10"), None)


def plan(*names: str) -> NodePlan:
    return NodePlan(devices=tuple(device(name) for name in names))


def bring(dataplane: EbpfDataplane, node: NodePlan) -> Mapping[Key, KernelError]:
    """As a proxier does at a verification; what was refused."""
    return dataplane.apply(diff(dataplane.read(), dataplane.render((), node)))


def in_step(dataplane: EbpfDataplane, node: NodePlan) -> bool:
    desired: dict[Key, Entry] = dataplane.render((), node)
    return dataplane.read() == desired


def programs(name: str) -> tuple[int | None, int | None]:
    ifindex = socket.if_nametoindex(name)
    return tc.program_id(ifindex, Side.INGRESS), tc.program_id(ifindex, Side.EGRESS)


def pinned(bpffs: Path, *names: str) -> tuple[int, ...]:
    """The ids of the current layout's programs."""
    (folder,) = (bpffs / "current").resolve().glob("programs_*")
    ids = []
    for name in names:
        with contextlib.closing(Program.pinned(folder / name)) as program:
            ids.append(program.id)
    return tuple(ids)


@pytest.mark.parametrize(
    ("role", "layer3", "expected"),
    [
        (DeviceRole.UPLINK, False, ("from_any", "to_any")),
        (DeviceRole.TUNNEL, True, ("from_any_l3", "to_any_l3")),
        (DeviceRole.POD, False, ("from_any", "to_any")),
    ],
)
def test_each_kind_of_device_has_programs_of_its_own(
    dataplane: EbpfDataplane, place: BpfPlace, role: DeviceRole, layer3: bool, expected: tuple[str, str]
) -> None:
    assert not bring(dataplane, NodePlan(devices=(device("net", role, layer3),)))
    assert programs("net") == pinned(place.bpffs, *expected)
    assert programs("pod") == (None, None)


def test_loopback_has_a_program_at_egress_alone(dataplane: EbpfDataplane, place: BpfPlace) -> None:
    assert not bring(dataplane, plan("lo"))
    assert not bring(dataplane, NodePlan(devices=(device("lo", DeviceRole.LOOPBACK),)))
    assert programs("lo") == (None, *pinned(place.bpffs, "to_any"))


def test_a_filter_that_somebody_removed_is_back_after_the_next_verification(
    dataplane: EbpfDataplane,
) -> None:
    bring(dataplane, plan("net", "pod"))
    before = programs("net")
    tc.detach(socket.if_nametoindex("net"), Side.EGRESS)
    assert not in_step(dataplane, plan("net", "pod"))
    assert not bring(dataplane, plan("net", "pod"))
    assert in_step(dataplane, plan("net", "pod"))
    assert programs("net") == before


@pytest.mark.parametrize("wanted", [True, False])
def test_the_program_of_another_code_is_replaced_or_removed(dataplane: EbpfDataplane, wanted: bool) -> None:
    node = plan("net") if wanted else NOBODY
    bring(dataplane, node)
    former = load_program(SCHED_CLS, 0)
    try:
        for side in Side:
            tc.attach(socket.if_nametoindex("net"), side, former)
        assert not in_step(dataplane, node)
        assert not bring(dataplane, node)
        assert in_step(dataplane, node)
        assert former.id not in programs("net")
        assert (None in programs("net")) is not wanted
    finally:
        former.close()


def test_what_the_map_lost_is_written_again(dataplane: EbpfDataplane, place: BpfPlace) -> None:
    bring(dataplane, plan("net"))
    with contextlib.closing(devices_map(place)) as devices:
        devices.delete(socket.if_nametoindex("net").to_bytes(4, "little"))
        assert not in_step(dataplane, plan("net"))
        assert not bring(dataplane, plan("net"))
        assert in_step(dataplane, plan("net"))


def devices_map(place: BpfPlace) -> Map:
    return Map.pinned((place.bpffs / "current").resolve() / "maps" / "devices")


# Others on the same device


def test_filters_of_others_and_their_clsact_are_left_alone(dataplane: EbpfDataplane, node: Namespace) -> None:
    node.tc("qdisc add dev net clsact", f"filter add dev net ingress prio 7 protocol all {U32}")
    ifindex = socket.if_nametoindex("net")
    theirs = tc.filters(ifindex, Side.INGRESS)
    bring(dataplane, plan("net"))
    assert [each for each in tc.filters(ifindex, Side.INGRESS) if not each.is_ours] == theirs
    node.tc("filter del dev net ingress prio 7")
    bring(dataplane, NOBODY)
    assert tc.has_clsact(ifindex), "it is theirs, though nothing is in it"


def test_our_clsact_goes_with_our_filters_unless_somebody_else_uses_it(
    dataplane: EbpfDataplane, node: Namespace
) -> None:
    bring(dataplane, plan("net", "pod"))
    node.tc(f"filter add dev pod egress prio 7 protocol all {U32}")
    bring(dataplane, NOBODY)
    assert not tc.has_clsact(socket.if_nametoindex("net"))
    assert tc.has_clsact(socket.if_nametoindex("pod"))
    assert programs("pod") == (None, None)
    assert tc.filters(socket.if_nametoindex("pod"), Side.EGRESS)


def test_a_device_where_somebody_is_in_the_way_is_refused_and_all_others_are_served(
    dataplane: EbpfDataplane, node: Namespace
) -> None:
    node.tc("qdisc add dev pod ingress")
    refused = bring(dataplane, plan("net", "pod"))
    assert [(str(key), type(failure)) for key, failure in refused.items()] == [("device pod", Unsupported)]
    assert None not in programs("net")
    assert programs("pod") == (None, None), "nothing is translated whose replies are not"


def test_a_priority_that_is_taken_is_named(dataplane: EbpfDataplane, node: Namespace) -> None:
    node.tc("qdisc add dev net clsact", f"filter add dev net egress prio {tc.PRIORITY} protocol all {U32}")
    (failure,) = bring(dataplane, plan("net")).values()
    assert isinstance(failure, AlreadyExists)
    assert "net" in failure.message


# From run to run


@pytest.mark.parametrize("sizes", [SIZES, OTHER_SIZES], ids=["same layout", "another layout"])
def test_the_next_run_takes_over_and_remembers_whose_the_clsact_is(
    settings: EbpfSettings, node: Namespace, sizes: MapSizes
) -> None:
    with running(settings) as first:
        bring(first, plan("net", "pod"))
        before = programs("net")
    assert programs("net") == before, "an agent that ends leaves all in place"
    with running(dataclasses.replace(settings, sizes=sizes)) as second:
        assert programs("net") == before, "nor does the next one change anything by coming"
        assert not bring(second, plan("net"))
        assert None not in programs("net")
        assert (programs("net") == before) is (sizes == SIZES)
        assert not tc.has_clsact(socket.if_nametoindex("pod"))
        bring(second, NOBODY)
        assert not tc.has_clsact(socket.if_nametoindex("net"))


def test_a_device_that_refuses_holds_a_former_layout_only_while_it_runs_its_program(
    settings: EbpfSettings, node: Namespace
) -> None:
    with running(settings) as first:
        bring(first, plan("net"))
        (former,) = settings.bpffs_root.glob("v*-*")
    node.tc("qdisc add dev pod ingress")
    with running(dataclasses.replace(settings, sizes=OTHER_SIZES)) as second:
        assert bring(second, plan("net", "pod"))
        assert not former.exists()
        assert (settings.bpffs_root / "current").resolve().is_dir()
        bring(second, NOBODY)


# What holds for the whole node


def node_entry(place: BpfPlace) -> tuple[int, int]:
    """Flags and inlet."""
    (layout,) = place.bpffs.glob("v*-*")
    with contextlib.closing(Map.pinned(layout / "maps" / "node")) as opened:
        _, flags, inlet, *_ = abi.NODE.unpack(opened.lookup(bytes(4)) or b"")
    return flags, inlet


def test_the_entry_of_the_node_is_repaired_when_it_is_read(dataplane: EbpfDataplane, place: BpfPlace) -> None:
    (layout,) = place.bpffs.glob("v*-*")
    with contextlib.closing(Map.pinned(layout / "maps" / "node")) as opened:
        before = opened.lookup(bytes(4))
        opened.update(bytes(4), bytes(abi.NODE.size))
        dataplane.read()
        assert opened.lookup(bytes(4)) == before
        assert any(before or b"")


def test_pods_lose_the_socket_path_only_when_all_else_is_in_force(
    settings: EbpfSettings, node: Namespace, place: BpfPlace
) -> None:
    with running(settings) as first:
        bring(first, NOBODY)
        assert node_entry(place) == (abi.NODE_SOCKETS_OF_PODS, 0)
    with running(dataclasses.replace(settings, socket_lb=SocketLb.HOST)) as second:
        assert node_entry(place)[0] == abi.NODE_SOCKETS_OF_PODS
        bring(second, plan("pod"))
        assert node_entry(place)[0] == 0
        assert None not in programs("pod")


def test_without_the_socket_path_there_is_an_inlet_and_no_hook(
    settings: EbpfSettings, node: Namespace, place: BpfPlace
) -> None:
    with running(settings) as first:
        bring(first, NOBODY)
        assert list((place.bpffs / "links").iterdir())
    with running(dataclasses.replace(settings, socket_lb=SocketLb.OFF)) as second:
        assert list((place.bpffs / "links").iterdir()), "until what takes their place is there"
        assert not bring(second, NOBODY)
        assert not list((place.bpffs / "links").iterdir())
        inlet = socket.if_nametoindex("ebpfproxy0")
        assert node_entry(place) == (0, inlet)
        node.ip("link del ebpfproxy0")
        second.read()
        assert node_entry(place) == (0, socket.if_nametoindex("ebpfproxy0"))
    with running(settings) as third:
        assert node_entry(place)[1] == socket.if_nametoindex("ebpfproxy0")
        assert not bring(third, NOBODY)
        assert list((place.bpffs / "links").iterdir())
        assert node_entry(place) == (abi.NODE_SOCKETS_OF_PODS, 0)
        assert "ebpfproxy0" not in dict(socket.if_nameindex()).values()


def test_hooks_of_another_layout_go_where_none_are_wanted(settings: EbpfSettings, node: Namespace) -> None:
    with running(settings) as first:
        bring(first, NOBODY)
    other = dataclasses.replace(settings, sizes=OTHER_SIZES, socket_lb=SocketLb.OFF)
    with running(other) as second:
        assert not bring(second, NOBODY)
        assert not list((settings.bpffs_root / "links").iterdir())


def test_hooks_go_also_where_the_kernel_has_no_links(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise Unsupported("no links")

    monkeypatch.setattr(cgroup, "attach_link", refuse)
    removal.remove(settings.bpffs_root, settings.cgroup_root)  # the links of the tests before
    with running(settings) as first:
        assert not bring(first, NOBODY)
        assert all(attached(settings))
    other = dataclasses.replace(settings, sizes=OTHER_SIZES, socket_lb=SocketLb.OFF)
    with running(other) as second:
        assert not bring(second, NOBODY)
        assert not any(attached(settings))


def attached(settings: EbpfSettings) -> list[list[int]]:
    """The ids of the programs at each hook."""
    return [cgroup.programs(settings.cgroup_root, hook.attach_type) for hook in SOCKET_HOOKS]


# cleanup


def test_cleanup_takes_everything_off_the_devices_and_says_so(
    settings: EbpfSettings, node: Namespace
) -> None:
    with running(dataclasses.replace(settings, socket_lb=SocketLb.OFF)) as dataplane:
        node.tc("qdisc add dev pod clsact")
        bring(dataplane, plan("net", "pod"))
    removed = removal.remove(settings.bpffs_root, settings.cgroup_root)
    assert removed[:6] == [
        *(f"filter at {side} of {name}" for name in ("net", "pod") for side in ("ingress", "egress")),
        "clsact of net",
        "devices ebpfproxy0 and ebpfproxy1",
    ]
    assert not tc.has_clsact(socket.if_nametoindex("net"))
    assert tc.has_clsact(socket.if_nametoindex("pod"))
    assert programs("pod") == (None, None)
    assert removal.remove(settings.bpffs_root, settings.cgroup_root) == []


def test_cleanup_removes_filters_also_where_the_bpffs_is_gone(
    settings: EbpfSettings, node: Namespace, tmp_path: Path
) -> None:
    with running(settings) as dataplane:
        bring(dataplane, plan("net"))
    removed = removal.remove(tmp_path, None)
    assert removed == ["filter at ingress of net", "filter at egress of net"]
    assert programs("net") == (None, None)
