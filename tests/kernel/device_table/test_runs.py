"""What one run leaves on devices, and the next makes of it: layouts, crashes, pins that go."""

import contextlib
import dataclasses
import shutil
import socket
import time
from typing import Any

import pytest

from ebpfproxy.dataplanes.delta import diff
from ebpfproxy.dataplanes.ebpf import abi, removal
from ebpfproxy.dataplanes.ebpf import dataplane as module
from ebpfproxy.dataplanes.ebpf.carry_over import CarryOver
from ebpfproxy.dataplanes.ebpf.dataplane import EbpfDataplane
from ebpfproxy.dataplanes.ebpf.entries import DeviceKey, Entry, Key
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.dataplanes.ebpf.programs import Programs
from ebpfproxy.dataplanes.ebpf.settings import EbpfSettings
from ebpfproxy.errors import AlreadyExists, Rejected
from ebpfproxy.kernel import tc
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.kernel.lock import FolderLock
from ebpfproxy.plan.service_plan import DeviceRole, NodePlan
from tests.kernel.device_table.plane import (
    CLSACT_ONLY,
    NOBODY,
    OTHER_SIZES,
    SIZES,
    attaching,
    bring,
    device,
    in_step,
    plan,
    programs,
    refuse,
    running,
)
from tests.support.flows import a_flow, entries
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel


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


@CLSACT_ONLY
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


@pytest.mark.parametrize("sizes", [SIZES, OTHER_SIZES], ids=["same layout", "another layout"])
def test_the_next_run_is_told_at_once_which_pods_were_served_or_seen_to_bypass(
    settings: EbpfSettings, node: Namespace, sizes: MapSizes
) -> None:
    with running(settings) as first:
        bring(first, NodePlan(devices=(device("net"), device("pod", DeviceRole.POD))))
        with contextlib.closing(
            Map.pinned(next(settings.bpffs_root.glob("v*-*/maps")) / "bypassing")
        ) as seen:
            seen.update((1000).to_bytes(4, "little"), bytes(8))
    told: list[frozenset[int]] = []
    with running(dataclasses.replace(settings, sizes=sizes), told.append) as second:
        assert told == [{socket.if_nametoindex("pod"), 1000}]
        bring(second, NOBODY)
    removal.remove(settings.bpffs_root, settings.cgroup_root)  # what bypasses is never forgotten


@CLSACT_ONLY
def test_who_ends_before_a_clsact_is_used_leaves_none_that_nobody_owns(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attaching().attach

    def attach(*given: Any) -> None:
        real(*given)
        raise KeyboardInterrupt

    with running(settings) as first, monkeypatch.context() as patch:
        patch.setattr(attaching(), "attach", attach)
        with pytest.raises(KeyboardInterrupt):
            bring(first, plan("net"))
    assert tc.has_clsact(socket.if_nametoindex("net"))
    with running(settings) as second:
        bring(second, NOBODY)
        assert not tc.has_clsact(socket.if_nametoindex("net"))


@CLSACT_ONLY
def test_a_device_that_refuses_leaves_no_clsact_that_counts_as_ours(
    dataplane: EbpfDataplane, node: Namespace
) -> None:
    node.tc("qdisc add dev pod ingress")
    assert bring(dataplane, plan("pod"))
    node.tc("qdisc del dev pod ingress", "qdisc add dev pod clsact")
    bring(dataplane, NOBODY)
    assert tc.has_clsact(socket.if_nametoindex("pod")), "it is theirs"


def test_a_device_that_goes_on_refusing_has_nothing_copied_again(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another layout remembers is hundreds of thousands of entries, and a sync comes at each change."""
    copies: list[CarryOver] = []
    monkeypatch.setattr(CarryOver, "copy", lambda self: copies.append(self))
    with running(settings) as first:
        bring(first, plan("net"))
    copies.clear()
    with running(dataclasses.replace(settings, sizes=OTHER_SIZES)) as second:
        with monkeypatch.context() as patch:
            patch.setattr(attaching(), "attach", refuse)
            assert bring(second, plan("net"))
            assert len(copies) == 2
            for _ in range(2):
                desired: dict[Key, Entry] = second.render((), plan("net"))
                again = [key for key in desired if isinstance(key, DeviceKey)]
                assert second.apply(diff({}, desired, again))
            assert len(copies) == 2
        assert not bring(second, plan("net"))
        assert len(copies) == 3
        assert len(set(map(id, copies))) == 1
        assert len(list(settings.bpffs_root.glob("v*-*"))) == 1
        bring(second, NOBODY)


def test_while_a_former_layouts_programs_run_ours_know_its_flows(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first device is switched, and until the last is, also when the agent is killed meanwhile."""
    lent: list[bool] = []
    real = attaching().attach

    def attach(*given: Any) -> None:
        lent.append(lends(settings))
        real(*given)

    def attach_one(*given: Any) -> None:
        lent.append(lends(settings))
        if given[0] == socket.if_nametoindex("pod"):
            refuse()
        real(*given)

    with running(settings) as first:
        bring(first, plan("net", "pod"))
    others = dataclasses.replace(settings, sizes=OTHER_SIZES)
    with running(others) as second, monkeypatch.context() as patch:
        patch.setattr(attaching(), "attach", attach_one)
        assert bring(second, plan("net", "pod"))
        assert lends(settings)
    with running(others) as third:
        assert lends(settings)
        monkeypatch.setattr(attaching(), "attach", attach)
        assert not bring(third, plan("net", "pod"))
        assert not lends(settings)
        bring(third, NOBODY)
    assert lent
    assert all(lent)


def lends(settings: EbpfSettings) -> bool:
    """Whether the programs of some layout know another's flows."""
    found = []
    for maps in settings.bpffs_root.glob("v*-*/maps"):
        with (
            contextlib.closing(Map.pinned(maps / "former_flows")) as lent,
            contextlib.closing(Map.pinned(maps / "node")) as node,
        ):
            _, since, *_ = abi.NODE.unpack(node.lookup(bytes(4)) or b"")
            assert since <= time.monotonic_ns()
            assert (lent.lookup(bytes(4)) is not None) is bool(since)
            found.append(bool(since))
    return any(found)


@pytest.mark.parametrize("how", ["killed", "device is let go", "device vanishes"])
def test_what_began_meanwhile_comes_along_also_where_nothing_is_left_to_replace(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The agent was killed when all was replaced; or a device that kept a former filter is gone."""
    others = dataclasses.replace(settings, sizes=OTHER_SIZES)
    real_attach, real_copy = attaching().attach, CarryOver.copy

    def attach(*given: Any) -> None:
        if how != "killed" and given[0] == pod:
            refuse()
        real_attach(*given)

    def copy(self: CarryOver) -> int:
        if how == "killed" and lends(settings):
            raise KeyboardInterrupt
        return real_copy(self)

    pod = socket.if_nametoindex("pod")
    with running(settings) as first:
        bring(first, plan("net", "pod"))
    former = Map.pinned(next(settings.bpffs_root.glob("v*-*/maps")) / "flows")
    with contextlib.ExitStack() as stack:
        stack.callback(former.close)
        second = stack.enter_context(running(others))
        with monkeypatch.context() as patch:
            patch.setattr(attaching(), "attach", attach)
            patch.setattr(CarryOver, "copy", copy)
            with contextlib.suppress(KeyboardInterrupt):
                assert bring(second, plan("net", "pod"))
        assert lends(settings)
        former.update_all(list(entries(a_flow(last_seen=time.monotonic_ns())).items()))
        if how == "killed":
            second.close()
            second = stack.enter_context(running(others))
        elif how == "device vanishes":
            node.ip("link del pod")
        assert not bring(second, plan("net"))
        assert not lends(settings)
        with contextlib.closing(Map.pinned(settings.bpffs_root / "current/maps/flows")) as present:
            assert len(list(present.items())) == 2
        bring(second, NOBODY)


def test_a_hook_that_refuses_does_not_keep_flows_lent(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program of the cgroup's writes any."""
    with running(settings) as first:
        bring(first, plan("net"))
    with running(dataclasses.replace(settings, sizes=OTHER_SIZES)) as second:
        with monkeypatch.context() as patch:
            patch.setattr(Programs, "_attach", refuse)
            assert bring(second, plan("net"))
        assert len(list(settings.bpffs_root.glob("v*-*"))) == 2
        assert not lends(settings)
        assert not bring(second, plan("net"))
        assert len(list(settings.bpffs_root.glob("v*-*"))) == 1
        bring(second, NOBODY)


# Pins that go


@pytest.mark.parametrize("part", ["Programs", "Maps", "NodeEntry", "FlowCollector", "Readings"])
def test_a_loading_anew_that_fails_half_way_is_done_by_the_next_reading(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    with running(settings) as dataplane:
        bring(dataplane, plan("net"))
        shutil.rmtree(next(settings.bpffs_root.glob("v*-*")))
        with monkeypatch.context() as patch:
            patch.setattr(module, part, refuse)
            for _ in range(2):
                with pytest.raises(Rejected, match="for once"):
                    dataplane.read()
            FolderLock(settings.bpffs_root).release()
        assert not bring(dataplane, plan("net"))
        assert in_step(dataplane, plan("net"))
        with pytest.raises(AlreadyExists):
            FolderLock(settings.bpffs_root)
        assert dataplane.counters()
        bring(dataplane, NOBODY)
        assert not tc.has_clsact(socket.if_nametoindex("net"))
