"""Debian's Prometheus scrapes an agent, and each alert fires when its fault is injected."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from socket import htons

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.lab import Agent, Lab, manifests
from ebpfproxy.linux.bpf import tcx
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import parse_address
from tests.kernel import attached
from tests.kernel.clients import TCP, UDP, connected, converse
from tests.kernel.cluster import START_PATIENCE, Cluster, eventually
from tests.kernel.others import HEAD, NEXT, filtered, linked, order, program
from tests.support import confined, prometheus
from tests.support.prometheus import Server

pytestmark = pytest.mark.kernel

_OFTEN = "--sync-period=1s"


@pytest.fixture(scope="module")
def node() -> Iterator[Cluster]:
    with Lab("test-alerts", 72) as lab, Cluster(lab) as made:
        yield made


@pytest.fixture(scope="module")
def server(node: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with prometheus.server(node.node, tmp_path_factory.mktemp("prometheus")) as made:
        yield made


@pytest.fixture
def healthy(node: Cluster, server: Server) -> Iterator[Cluster]:
    """A running agent that is scraped, and no alert."""
    node.ebpfproxy("cleanup")
    node.remove_files()
    node.start(_OFTEN)
    eventually(lambda: server.value("up") == 1, "the agent is scraped")
    eventually(lambda: not server.firing(), "no alert of a previous test fires")
    yield node
    node.end()


def fires(server: Server, alert: str, inject: Callable[[], object] = lambda: None) -> None:
    """Wait for the alert; `inject` is called each time before."""

    def firing() -> bool:
        inject()
        return alert in server.firing()

    eventually(firing, f"{alert} fires")


def test_all_metrics_of_the_alerts_are_scraped_without_an_alert(healthy: Cluster, server: Server) -> None:
    names = (
        "ebpfproxy_info",
        "ebpfproxy_map_entries",
        "ebpfproxy_rejected_entries",
        "ebpfproxy_sockets_stale",
    )
    eventually(lambda: all(server.value(f"count({name})") for name in names), "all of them")
    assert server.value('ebpfproxy_info{mode="ebpf"}') == 1
    assert server.firing() == set()


def test_down_fires_when_the_agent_is_killed(healthy: Cluster, server: Server) -> None:
    healthy.end()
    fires(server, "EbpfproxyDown")
    healthy.start(_OFTEN)
    eventually(lambda: "EbpfproxyDown" not in server.firing(), "the alert ends")


def test_drift_fires_when_another_program_deletes_entries_again_and_again(
    healthy: Cluster, server: Server
) -> None:
    web = healthy.service().to(healthy.a)
    key = abi.SERVICE_KEY.pack(parse_address(web.v4), htons(80), TCP, 0)
    layout = (healthy.lab.bpffs / "current").resolve()

    def delete() -> None:
        if services.lookup(key) is not None:
            services.delete(key)

    with contextlib.closing(Map.pinned(layout / "maps/services")) as services:
        fires(server, "EbpfproxyDriftRepaired", delete)


@pytest.mark.long  # promtool checks its rule in make test
def test_map_alerts_fire_when_a_map_is_full(healthy: Cluster, server: Server) -> None:
    healthy.end()
    healthy.ebpfproxy("cleanup")  # a larger map would be migrated
    objects = []
    for number in range(1, 21):
        name = f"single-{number}"
        objects.append(manifests.service(name, [f"10.96.230.{number}"], [manifests.port(80)]))
        objects.append(manifests.endpoint_slice(name, name, [healthy.a.v4], [manifests.port(8080)]))
    manifests.write(healthy.folder / "singles.yaml", *objects)
    healthy.start(_OFTEN, "--ebpf-services-max=20")
    fires(server, "EbpfproxyEntriesRejected")
    fires(server, "EbpfproxyMapNearlyFull")


@pytest.mark.long  # promtool checks its rule in make test
def test_the_alerts_about_devices_fire_when_another_program_keeps_the_first_place(
    healthy: Cluster, server: Server
) -> None:
    stop = threading.Event()

    def fight() -> None:
        way = linked if tcx.is_supported() else filtered
        with netns.entered(healthy.node.netns), program(NEXT) as foreign:
            uplink = socket.if_nametoindex("eth0")

            def regained() -> bool:
                first = order(uplink, Side.INGRESS)[:1]
                return stop.is_set() or first == [attached.program_id(uplink, Side.INGRESS)]

            while not stop.is_set():
                with way(uplink, Side.INGRESS, foreign, HEAD):
                    eventually(regained, "the agent's program is first", START_PATIENCE)

    fighter = threading.Thread(target=fight)
    fighter.start()
    try:
        fires(server, "EbpfproxyForeignProgramFirst")
        fires(server, "EbpfproxyBypassed")
    finally:
        stop.set()
        fighter.join()


def test_fallback_fires_when_bpf_is_not_permitted(healthy: Cluster, server: Server) -> None:
    healthy.end()
    healthy.ebpfproxy("cleanup")
    before = confined.without("bpf", "perfmon", "sys_admin")
    healthy.launch("--proxy-mode=auto", "--oom-score-adj=0", before=before)
    healthy.agent.await_sync()
    assert healthy.http_get("proxyMode") != "ebpf"
    fires(server, "EbpfproxyModeFallback")


def test_objects_fires_when_an_object_is_rejected(healthy: Cluster, server: Server) -> None:
    numbers = itertools.count(1)

    def write() -> None:
        name = f"invalid-{next(numbers)}"
        service = manifests.service(name, ["10.96.231.1"], [manifests.port(80)])
        service["spec"]["ports"][0]["port"] = "eighty"
        manifests.write(healthy.folder / "invalid.yaml", service)

    fires(server, "EbpfproxyObjectsRejected", write)


@pytest.mark.long  # promtool checks its rule in make test
def test_api_server_unreachable_fires_when_nothing_listens_at_its_address(
    healthy: Cluster, server: Server
) -> None:
    healthy.end()
    flags = (
        "--master=http://127.0.0.1:1",
        f"--bpffs-root={healthy.lab.bpffs}",
        f"--cgroup-root={healthy.lab.cgroup}",
        f"--hostname-override={healthy.lab.node_name}",
    )
    agent = Agent(healthy.node, flags)
    try:
        fires(server, "EbpfproxyApiServerUnreachable")
    finally:
        agent.kill()


@pytest.mark.long  # promtool checks its rule in make test
def test_stale_sockets_fires_when_the_agent_may_not_reconnect_sockets(
    healthy: Cluster, server: Server
) -> None:
    healthy.launch(_OFTEN, before=confined.without("sys_ptrace"))
    healthy.agent.await_sync()
    web = healthy.service().to(healthy.a)
    with connected(healthy.node, UDP, web.v4, 53) as client:
        assert converse(client) == "a"
        web.to(healthy.b)
        fires(server, "EbpfproxyStaleUdpSockets")
