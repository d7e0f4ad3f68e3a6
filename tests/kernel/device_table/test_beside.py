"""More than one agent in one network namespace, and cleanup in it."""

import contextlib
import dataclasses
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import cleanup
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.bpf import tc
from ebpfproxy.linux.locks import NamespaceLock
from ebpfproxy.linux.netlink import links
from ebpfproxy.plan.service_plan import SocketLb
from tests.kernel.device_table.plane import CLSACT_ONLY, EMPTY_PLAN, bring, in_step, plan, programs, running
from tests.support.bpf_place import bpf_place
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel


@pytest.fixture
def other_settings(settings: EbpfSettings) -> Iterator[EbpfSettings]:
    """The settings of another agent, with a separate bpffs root and cgroup."""
    with bpf_place() as place:
        yield dataclasses.replace(settings, cgroup_root=place.cgroup, bpffs_root=place.bpffs)


def test_an_agent_without_devices_leaves_the_devices_of_another_agent_unchanged(
    settings: EbpfSettings, other_settings: EbpfSettings, node: Namespace
) -> None:
    without = dataclasses.replace(other_settings, devices=False)
    with running(dataclasses.replace(settings, socket_lb=SocketLb.OFF)) as first:
        bring(first, plan("net"))
        before = programs("net")
        with running(without) as second:
            assert not bring(second, EMPTY_PLAN)
            assert in_step(second, EMPTY_PLAN)
        assert programs("net") == before
        assert "ebpfproxy0" in links.names().values()
        assert in_step(first, plan("net"))
        bring(first, EMPTY_PLAN)


def test_an_agent_restarted_without_devices_removes_only_its_own_programs(
    settings: EbpfSettings, other_settings: EbpfSettings, node: Namespace
) -> None:
    with running(other_settings) as previous:
        bring(previous, plan("net", "pod"))
    with running(settings) as other:
        bring(other, plan("net"))
        foreign = programs("net")
        with running(dataclasses.replace(other_settings, devices=False)) as present:
            assert not bring(present, EMPTY_PLAN)
            assert in_step(present, EMPTY_PLAN)
        assert programs("net") == foreign
        assert programs("pod") == (None, None)
        assert not tc.has_clsact(socket.if_nametoindex("pod"))
        bring(other, EMPTY_PLAN)


@pytest.mark.parametrize("pinned", [True, False], ids=["another root", "no bpffs"])
def test_cleanup_of_another_root_is_rejected_while_an_agent_with_devices_runs(
    settings: EbpfSettings, other_settings: EbpfSettings, node: Namespace, tmp_path: Path, pinned: bool
) -> None:
    root = other_settings.bpffs_root if pinned else tmp_path
    command = ["cleanup", f"--bpffs-root={root}", f"--cgroup-root={other_settings.cgroup_root}"]
    with running(settings) as backend, contextlib.ExitStack() as held:
        held.callback(NamespaceLock().release)  # the lock that a backend with devices holds
        bring(backend, plan("net"))
        before = programs("net")
        done = subprocess.run(
            [sys.executable, "-m", "ebpfproxy", *command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == Rejected.exit_code, done.stderr
        assert "this network namespace" in done.stderr
        assert "stop the agent" in done.stderr
        assert programs("net") == before
        bring(backend, EMPTY_PLAN)


# cleanup


def test_cleanup_removes_and_reports_everything_on_the_devices(
    settings: EbpfSettings, node: Namespace, way: str
) -> None:
    with running(dataclasses.replace(settings, socket_lb=SocketLb.OFF)) as backend:
        node.tc("qdisc add dev pod clsact")
        bring(backend, plan("net", "pod"))
    removed = cleanup.remove(settings.bpffs_root, settings.cgroup_root)
    what = "link" if way == "tcx" else "filter"
    expected = [f"{what} at {side} of {name}" for name in ("net", "pod") for side in ("ingress", "egress")]
    expected += ["clsact of net"] if way == "clsact" else []
    expected += ["devices ebpfproxy0 and ebpfproxy1"]
    assert removed[: len(expected)] == expected
    assert not (settings.bpffs_root / "devices").exists()
    assert not tc.has_clsact(socket.if_nametoindex("net"))
    assert tc.has_clsact(socket.if_nametoindex("pod"))
    assert programs("pod") == (None, None)
    assert cleanup.remove(settings.bpffs_root, settings.cgroup_root) == []


@CLSACT_ONLY
def test_cleanup_removes_filters_also_without_a_bpffs(
    settings: EbpfSettings, node: Namespace, tmp_path: Path
) -> None:
    with running(settings) as backend:
        bring(backend, plan("net"))
    removed = cleanup.remove(tmp_path, None)
    assert removed == ["filter at ingress of net", "filter at egress of net"]
    assert programs("net") == (None, None)
