"""What one run leaves on devices, and the next makes of it: layouts, crashes, pins that go."""

import contextlib
import dataclasses
import shutil
import socket
from typing import Any

import pytest

from ebpfproxy.dataplanes.delta import diff
from ebpfproxy.dataplanes.ebpf import dataplane as module
from ebpfproxy.dataplanes.ebpf import removal
from ebpfproxy.dataplanes.ebpf.carry_over import CarryOver
from ebpfproxy.dataplanes.ebpf.dataplane import EbpfDataplane
from ebpfproxy.dataplanes.ebpf.entries import DeviceKey, Entry, Key
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
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
