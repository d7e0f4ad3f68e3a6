"""An agent without tcx that checks its devices once an hour, so that only notifications trigger a check."""

import json
import socket
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf.devices.positions import FIRST_AGAIN, PROGRAMS_BEFORE
from ebpfproxy.linux.bpf import tc
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netns import netns
from tests.kernel.clients import TCP, answers, outcome
from tests.kernel.cluster import START_PATIENCE, Cluster, Exposed, eventually
from tests.kernel.others import PASS, filtered, program

pytestmark = pytest.mark.kernel

_SELDOM = """
import runpy, sys
from ebpfproxy.linux.bpf import tcx
from ebpfproxy.agent.pacing import CheckTimer
tcx.is_supported = lambda: False
CheckTimer.INTERVAL = 3600.0
sys.argv = sys.argv[3:]
runpy.run_module("ebpfproxy", run_name="__main__", alter_sys=True)
"""
SIDES = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)


@pytest.fixture(scope="module")
def serving(_restartable: Cluster) -> Iterator[tuple[Cluster, Exposed]]:
    agent = _restartable.launch("--sync-period=1h", before=[sys.executable, "-c", _SELDOM])
    agent.await_sync(timeout=START_PATIENCE)
    yield _restartable, _restartable.service(node_port=True).to(_restartable.a)
    _restartable.end()
    _restartable.remove_files()
    _restartable.ebpfproxy("cleanup")


def is_served(cluster: Cluster, web: Exposed) -> bool:
    return outcome(cluster.lab.outside, TCP, cluster.node.v4, web.node_port, 0.3) == "a"


def names(ifindex: int, side: Side) -> list[str]:
    """The names of the filters at the device, in running order."""
    return [one.name for one in tc.filters(ifindex, side)]


def not_first_devices(cluster: Cluster) -> object:
    """The devices in the body of /readyz."""

    def ask() -> bytes:
        return bytes(urllib.request.urlopen("http://127.0.0.1:10256/readyz", timeout=60).read())

    return json.loads(cluster.node.call(ask)).get("devices", [])


@SIDES
def test_the_agent_moves_before_a_foreign_filter_in_first_position(
    serving: tuple[Cluster, Exposed], side: Side
) -> None:
    cluster, web = serving
    eventually(lambda: is_served(cluster, web), "served before")
    since = len(cluster.agent.lines)
    with netns.entered(cluster.node.netns), program(PASS) as foreign:
        index = socket.if_nametoindex("eth0")
        with filtered(index, side, foreign):
            cluster.agent.await_line(lambda line: PROGRAMS_BEFORE in line.text, since)
            cluster.agent.await_line(lambda line: FIRST_AGAIN in line.text, since)
            assert names(index, side) == ["ebpfproxy", f"foreign_{foreign.id}"]
            assert set(answers(cluster.lab.outside, TCP, cluster.node.v4, web.node_port, 10)) == {"a"}
            assert not_first_devices(cluster) == []


def test_a_removed_clsact_qdisc_is_restored(serving: tuple[Cluster, Exposed]) -> None:
    cluster, web = serving
    eventually(lambda: is_served(cluster, web), "served before")
    cluster.node.run(["tc", "qdisc", "del", "dev", "eth0", "clsact"])
    with netns.entered(cluster.node.netns):
        index = socket.if_nametoindex("eth0")
        eventually(lambda: all(names(index, side) == ["ebpfproxy"] for side in Side), "restored")
    assert set(answers(cluster.lab.outside, TCP, cluster.node.v4, web.node_port, 10)) == {"a"}
