"""Programs on devices across restarts: other map sizes, crashes, removed pins, older versions."""

import contextlib
import dataclasses
import shutil
import socket
import time
from typing import Any

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf import backend as module
from ebpfproxy.backends.ebpf import cleanup
from ebpfproxy.backends.ebpf.backend import EbpfBackend
from ebpfproxy.backends.ebpf.entries import DeviceKey, Entry, Key
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.ebpf.migration.migrate import Migration
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.backends.ebpf.programs import Programs
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.errors import AlreadyExists, Rejected
from ebpfproxy.linux.bpf import tc
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.locks import FolderLock
from ebpfproxy.plan.service_plan import DeviceRole, NodePlan
from tests.kernel.device_table.plane import (
    CLSACT_ONLY,
    EMPTY_PLAN,
    OTHER_SIZES,
    SIZES,
    attaching,
    bring,
    device,
    in_step,
    plan,
    programs,
    reject,
    running,
)
from tests.support.flows import a_flow, entries
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("sizes", [SIZES, OTHER_SIZES], ids=["same sizes", "other sizes"])
def test_the_next_run_adopts_the_programs_and_the_clsact_owner(
    settings: EbpfSettings, node: Namespace, sizes: MapSizes
) -> None:
    with running(settings) as first:
        bring(first, plan("net", "pod"))
        before = programs("net")
    assert programs("net") == before, "an agent that ends keeps its programs"
    with running(dataclasses.replace(settings, sizes=sizes)) as second:
        assert programs("net") == before, "the start of the next agent changes nothing"
        assert not bring(second, plan("net"))
        assert None not in programs("net")
        assert (programs("net") == before) is (sizes == SIZES)
        assert not tc.has_clsact(socket.if_nametoindex("pod"))
        bring(second, EMPTY_PLAN)
        assert not tc.has_clsact(socket.if_nametoindex("net"))


@CLSACT_ONLY
def test_a_rejecting_device_without_previous_programs_does_not_keep_them(
    settings: EbpfSettings, node: Namespace
) -> None:
    with running(settings) as first:
        bring(first, plan("net"))
        (previous,) = settings.bpffs_root.glob("programs-*")
    node.tc("qdisc add dev pod ingress")
    with running(dataclasses.replace(settings, sizes=OTHER_SIZES)) as second:
        assert bring(second, plan("net", "pod"))
        assert not previous.exists()
        assert (settings.bpffs_root / "current").resolve().is_dir()
        bring(second, EMPTY_PLAN)


@pytest.mark.parametrize("sizes", [SIZES, OTHER_SIZES], ids=["same sizes", "other sizes"])
def test_the_next_run_reports_at_once_the_pods_that_have_programs_or_bypass(
    settings: EbpfSettings, node: Namespace, sizes: MapSizes
) -> None:
    with running(settings) as first:
        bring(first, NodePlan(devices=(device("net"), device("pod", DeviceRole.POD))))
        with contextlib.closing(
            Map.pinned(next(settings.bpffs_root.glob("programs-*/maps")) / "bypassing")
        ) as seen:
            seen.update((1000).to_bytes(4, "little"), bytes(8))
    reported: list[frozenset[int]] = []
    with running(dataclasses.replace(settings, sizes=sizes), reported.append) as second:
        # A thread may have read the map meanwhile, and reports bypassing pods again.
        assert reported[0] == {socket.if_nametoindex("pod"), 1000}
        bring(second, EMPTY_PLAN)
    cleanup.remove(settings.bpffs_root, settings.cgroup_root)  # entries of bypassing pods never expire


@CLSACT_ONLY
def test_a_clsact_of_an_agent_killed_during_an_attach_is_removed_later(
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
        bring(second, EMPTY_PLAN)
        assert not tc.has_clsact(socket.if_nametoindex("net"))


@CLSACT_ONLY
def test_after_a_rejected_attach_a_foreign_clsact_is_not_removed(
    backend: EbpfBackend, node: Namespace
) -> None:
    node.tc("qdisc add dev pod ingress")
    assert bring(backend, plan("pod"))
    node.tc("qdisc del dev pod ingress", "qdisc add dev pod clsact")
    bring(backend, EMPTY_PLAN)
    assert tc.has_clsact(socket.if_nametoindex("pod")), "the clsact is foreign"


def test_a_device_that_keeps_rejecting_causes_no_repeated_copies(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be hundreds of thousands of entries, and each change causes a sync."""
    copies: list[Migration] = []
    with running(settings) as first:
        bring(first, plan("net"))
    monkeypatch.setattr(Migration, "copy", lambda self: copies.append(self))
    with running(dataclasses.replace(settings, sizes=OTHER_SIZES)) as second:
        with monkeypatch.context() as patch:
            patch.setattr(attaching(), "attach", reject)
            assert bring(second, plan("net"))
            assert len(copies) == 3
            for _ in range(2):
                desired: dict[Key, Entry] = second.render((), plan("net"))
                again = [key for key in desired if isinstance(key, DeviceKey)]
                assert second.apply(diff({}, desired, again))
            assert len(copies) == 3
        assert not bring(second, plan("net"))
        assert len(copies) == 4
        assert len(set(map(id, copies))) == 1
        assert len(list(settings.bpffs_root.glob("programs-*"))) == 1
        bring(second, EMPTY_PLAN)


def test_new_programs_look_up_flows_of_previous_programs_while_those_run(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From before the first device is switched until the last one is, also if the agent is killed
    meanwhile."""
    lookups: list[bool] = []
    real = attaching().attach

    def attach(*given: Any) -> None:
        lookups.append(looks_up_previous(settings))
        real(*given)

    def attach_one(*given: Any) -> None:
        lookups.append(looks_up_previous(settings))
        if given[0] == socket.if_nametoindex("pod"):
            reject()
        real(*given)

    with running(settings) as first:
        bring(first, plan("net", "pod"))
    others = dataclasses.replace(settings, sizes=OTHER_SIZES)
    with running(others) as second, monkeypatch.context() as patch:
        patch.setattr(attaching(), "attach", attach_one)
        assert bring(second, plan("net", "pod"))
        assert looks_up_previous(settings)
    with running(others) as third:
        assert looks_up_previous(settings)
        monkeypatch.setattr(attaching(), "attach", attach)
        assert not bring(third, plan("net", "pod"))
        assert not looks_up_previous(settings)
        bring(third, EMPTY_PLAN)
    assert lookups
    assert all(lookups)


def looks_up_previous(settings: EbpfSettings) -> bool:
    """Whether programs look up flows also in the previous map."""
    (pin,) = settings.bpffs_root.glob("maps/previous_flows-*")
    with contextlib.closing(Map.pinned(pin)) as opened:
        return opened.lookup(bytes(4)) is not None


@pytest.mark.parametrize("way", ["killed", "device is deselected", "device vanishes"])
def test_flows_are_migrated_also_if_no_program_is_left_to_replace(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The agent was killed after the replacement, or the device with the previous filter is gone."""
    others = dataclasses.replace(settings, sizes=OTHER_SIZES)
    real_attach, real_finish = attaching().attach, Migration.finish_flows

    def attach(*given: Any) -> None:
        if way != "killed" and given[0] == pod:
            reject()
        real_attach(*given)

    def finish_flows(self: Migration) -> None:
        if way == "killed":
            raise KeyboardInterrupt
        real_finish(self)

    pod = socket.if_nametoindex("pod")
    with running(settings) as first:
        bring(first, plan("net", "pod"))
    previous = Map.pinned(next(settings.bpffs_root.glob("programs-*/maps")) / "flows")
    with contextlib.ExitStack() as stack:
        stack.callback(previous.close)
        second = stack.enter_context(running(others))
        with monkeypatch.context() as patch:
            patch.setattr(attaching(), "attach", attach)
            patch.setattr(Migration, "finish_flows", finish_flows)
            with contextlib.suppress(KeyboardInterrupt):
                assert bring(second, plan("net", "pod"))
        assert looks_up_previous(settings)
        previous.update_all(list(entries(a_flow(last_seen=time.monotonic_ns())).items()))
        if way == "killed":
            second.close()
            second = stack.enter_context(running(others))
        elif way == "device vanishes":
            node.ip("link del pod")
        assert not bring(second, plan("net"))
        assert not looks_up_previous(settings)
        with contextlib.closing(Map.pinned(settings.bpffs_root / "current/maps/flows")) as present:
            assert len(list(present.items())) == 1
        bring(second, EMPTY_PLAN)


def test_a_rejecting_hook_does_not_delay_the_migration_of_flows(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of the cgroup write no flows."""
    with running(settings) as first:
        bring(first, plan("net"))
    with running(dataclasses.replace(settings, sizes=OTHER_SIZES)) as second:
        with monkeypatch.context() as patch:
            patch.setattr(Programs, "_attach", reject)
            assert bring(second, plan("net"))
        assert len(list(settings.bpffs_root.glob("programs-*"))) == 2
        assert not looks_up_previous(settings)
        assert not bring(second, plan("net"))
        assert len(list(settings.bpffs_root.glob("programs-*"))) == 1
        bring(second, EMPTY_PLAN)


def test_pins_of_version_0_1_are_rejected_until_cleanup_has_removed_them(
    settings: EbpfSettings, node: Namespace
) -> None:
    """Version 0.1 had maps and programs in one folder, and filters with the same name."""
    with running(settings) as first:
        bring(first, plan("net"))
    root = settings.bpffs_root
    (root / "v2-0123456789").mkdir()
    for path in (*root.glob("programs-*"), root / "maps"):
        shutil.rmtree(path)
    Pins(root).set_current(root / "v2-0123456789")
    with pytest.raises(Rejected, match="v2-0123456789: it is of version") as rejected, running(settings):
        pass
    assert rejected.value.hint == "run `ebpfproxy cleanup`"
    assert programs("net") != (None, None)
    removed = cleanup.remove(root, settings.cgroup_root)
    assert "pins v2-0123456789" in removed
    assert programs("net") == (None, None)
    left = {path.name for path in root.iterdir()}
    assert left <= {"maps.debug", "progs.debug"}, "the kernel creates these in each bpffs"
    with running(settings) as second:
        assert not bring(second, plan("net"))
        bring(second, EMPTY_PLAN)


# Removed pins


@pytest.mark.parametrize("part", ["Programs", "Maps", "NodeEntry", "FlowCollector", "Readings"])
def test_a_failed_reload_is_completed_by_the_next_read(
    settings: EbpfSettings, node: Namespace, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    with running(settings) as backend:
        bring(backend, plan("net"))
        shutil.rmtree(next(settings.bpffs_root.glob("programs-*")))
        shutil.rmtree(settings.bpffs_root / "maps")
        with monkeypatch.context() as patch:
            patch.setattr(module, part, reject)
            for _ in range(2):
                with pytest.raises(Rejected, match="rejected once"):
                    backend.read()
            FolderLock(settings.bpffs_root).release()
        assert not bring(backend, plan("net"))
        assert in_step(backend, plan("net"))
        with pytest.raises(AlreadyExists):
            FolderLock(settings.bpffs_root)
        assert backend.report().events
        bring(backend, EMPTY_PLAN)
        assert not tc.has_clsact(socket.if_nametoindex("net"))
