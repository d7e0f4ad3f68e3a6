"""The lab without the agent: the features on which kernel tests rely."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.bench.load import Load, LoadFailed
from ebpfproxy.errors import AlreadyExists, ConfigError, NotFound, Unsupported
from ebpfproxy.lab import Lab, PodNetwork, sockets, testbed
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from tests.support import datagrams, offloads

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("test-lab") as lab:
        lab.pod("client")
        server = lab.pod("server")
        server.serve(Protocol.TCP, 80, lambda address, _port: f"server to {address}")
        server.serve(Protocol.UDP, 53, lambda address, _port: f"server to {address}")
        yield lab


def _traces(identity: str) -> list[Path]:
    """Everything that a lab of this identity has on the machine."""
    folders = [testbed.cgroup_mount(), testbed.RUN, netns.FOLDER]
    found = [path for folder in folders for path in folder.glob(f"{identity}*")]
    mounts = [Path(line.split(" ")[1]) for line in Path("/proc/mounts").read_text().splitlines()]
    return found + [path for path in mounts if identity in str(path)]


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
@pytest.mark.parametrize("family", ["v4", "v6"])
def test_pods_of_a_node_reach_each_other_with_their_own_addresses(
    lab: Lab, protocol: Protocol, family: str
) -> None:
    client, server = lab.pods["client"], lab.pods["server"]
    port = 80 if protocol == Protocol.TCP else 53
    assert client.ask(protocol, getattr(server, family), port) == f"server to {getattr(client, family)}"


def test_the_host_and_an_external_client_reach_a_pod(lab: Lab) -> None:
    server = lab.pods["server"]
    assert lab.node.ask(Protocol.TCP, server.v4, 80) == "server to 10.244.1.1"
    assert lab.outside.ask(Protocol.TCP, server.v4, 80) == f"server to {lab.outside.v4}"
    assert lab.outside.ask(Protocol.TCP, server.v6, 80) == f"server to {lab.outside.v6}"


def test_ask_unconnected_returns_the_replys_source_address(lab: Lab) -> None:
    client, server = lab.pods["client"], lab.pods["server"]
    answer, peer = client.call(lambda: datagrams.ask_unconnected(server.v6, 53))
    assert (answer, peer) == (f"server to {client.v6}", (server.v6, 53))


def test_a_command_runs_in_its_pods_namespace_and_cgroup(lab: Lab) -> None:
    client = lab.pods["client"]
    script = "readlink /proc/self/ns/net; cat /proc/self/cgroup"
    namespace, *cgroups = client.run(["sh", "-c", script]).stdout.splitlines()
    assert namespace == f"net:[{client.netns.stat().st_ino}]"
    below = client.cgroup.relative_to(lab.cgroup)
    assert below.parts[0] == "kubepods"
    assert f"0::/{lab.identity}/node/{below}" in cgroups


def test_a_failed_command_raises_with_its_stderr(lab: Lab) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        lab.node.run(["sh", "-c", "echo no good >&2; exit 3"])
    assert (caught.value.returncode, caught.value.__notes__) == (3, ["no good\n"])


def test_an_exception_in_a_netns_is_raised_with_its_traceback(lab: Lab) -> None:
    with pytest.raises(ConnectionRefusedError) as caught:
        lab.pods["client"].ask(Protocol.TCP, lab.pods["server"].v4, 81)
    assert "sockets.py" in caught.value.__notes__[0]


def test_a_hanging_call_is_killed_after_its_timeout(lab: Lab) -> None:
    reading, _writing = socket.socketpair()
    call = lab.node.start(lambda: reading.recv(1))
    with pytest.raises(TimeoutError):
        call.result(timeout=0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(call.pid, 0)


def test_a_server_on_a_taken_port_is_rejected(lab: Lab) -> None:
    with pytest.raises(OSError, match="Address already in use"):
        lab.pods["server"].serve(Protocol.TCP, 80)


def test_a_second_pod_of_the_same_name_is_rejected(lab: Lab) -> None:
    with pytest.raises(AlreadyExists):
        lab.pod("client")
    with pytest.raises(ConfigError):
        lab.pod("a-name-too-long")


def test_a_removed_pod_leaves_nothing(lab: Lab) -> None:
    pod = lab.pod("brief")
    server = pod.serve_http(80)
    lab.remove_pod(pod)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    assert not pod.cgroup.exists()
    assert not pod.netns.exists()
    assert "vethbrief" not in lab.node.run(["ip", "-o", "link"]).stdout


def test_two_labs_are_separate(lab: Lab) -> None:
    with Lab("test-other", number=2) as other:
        pod = other.pod("client")
        pod.serve(Protocol.TCP, 80)
        assert pod.v4 == "10.244.2.2"
        assert other.node.ask(Protocol.TCP, pod.v4, 80) == "client"
        with pytest.raises(OSError, match=r"unreachable|timed out|rejected|No route"):
            lab.node.call(lambda: sockets.ask(Protocol.TCP, pod.v4, 80, timeout=0.2))


def test_a_lab_leaves_nothing_after_an_exception() -> None:
    lab = Lab("test-fails")

    def fail() -> None:
        with lab:
            lab.pod("server").serve_http(80)
            assert _traces(lab.identity)
            raise NotADirectoryError

    with pytest.raises(NotADirectoryError):
        fail()
    assert _traces(lab.identity) == []


_VICTIM = textwrap.dedent(
    """
    import signal, sys
    from ebpfproxy.lab import Lab
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and so does what nohup runs
    with Lab(sys.argv[1]) as lab:
        lab.pod("server").serve_http(80)
        print(lab.identity, flush=True)
        signal.pause()
    """
)


def _victim(name: str) -> "tuple[subprocess.Popen[str], str]":
    """A process with a lab, and the lab's identity."""
    process = subprocess.Popen([sys.executable, "-c", _VICTIM, name], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout as out:
        return process, out.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_lab_leaves_nothing_after_a_signal(number: signal.Signals) -> None:
    process, identity = _victim("test-signal")
    assert _traces(identity)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    assert _traces(identity) == []


def test_the_state_of_a_killed_lab_is_removed_by_the_next_lab() -> None:
    process, identity = _victim("test-killed")
    process.kill()
    process.wait()
    assert _traces(identity)
    with Lab("test-killed"):
        assert _traces(identity) == []


def test_a_lab_with_a_live_process_is_not_removed() -> None:
    with Lab("test-alive") as lab:
        testbed.remove_stale_labs("test-alive")
        assert _traces(lab.identity)


@pytest.fixture(scope="module", params=PodNetwork)
def pair(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Two nodes with a pod on each; the pod on the second node is a server."""
    try:
        with Lab("test-two", 60, request.param) as lab:
            lab.pod("client")
            server = lab.nodes[1].pod("server")
            for protocol in (Protocol.TCP, Protocol.UDP):
                server.serve_echo(protocol, 80)
            yield lab
    except Unsupported:
        pytest.skip(f"this kernel has no {request.param.name}")


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_pods_of_two_nodes_reach_each_other_with_their_own_addresses(pair: Lab, family: str) -> None:
    client, server = pair.pods["client"], pair.nodes[1].pods["server"]
    for each in (client, pair.bypassing(client)):
        for protocol in (Protocol.TCP, Protocol.UDP):
            answer = each.ask(protocol, getattr(server, family), 80)
            assert answer == f"server {getattr(client, family)}"


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_data_larger_than_a_packet_reaches_a_pod_on_another_node(pair: Lab, family: str) -> None:
    address = getattr(pair.nodes[1].pods["server"], family)
    payload = os.urandom(9000)

    def talk() -> tuple[bytes, bytes]:
        with sockets.dial(Protocol.TCP, address, 80) as stream:
            streamed = sockets.exchange(stream, payload * 20)
        with sockets.dial(Protocol.UDP, address, 80, timeout=0.3) as client:
            return streamed, datagrams.exchange_datagram(client, payload)

    for client in (pair.pods["client"], pair.node):
        assert client.call(talk) == (payload * 20, payload)


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_an_external_client_reaches_both_nodes_through_the_router(pair: Lab, family: str) -> None:
    for node in pair.nodes:
        server = node.host.serve_echo(Protocol.TCP, 81)
        assert pair.outside.ask(Protocol.TCP, getattr(node.host, family), 81) == (
            f"{node.host.name} {getattr(pair.outside, family)}"
        )
        server.kill()


def test_the_kind_of_pod_network_can_be_changed(pair: Lab) -> None:
    address = pair.nodes[1].pods["server"].v6
    for kind in (PodNetwork.VXLAN, PodNetwork.USER, PodNetwork.ROUTED):
        pair.backbone.join(kind)
        assert pair.pods["client"].ask(Protocol.TCP, address, 80).startswith("server ")
        route = pair.node.run(["ip", "route", "get", address]).stdout
        assert {"vxlan0": "vxlan", "flannel0": "user", "eth0": "routed"}[_device(route)] == kind.value


def _device(route: str) -> str:
    words = route.split()
    return words[words.index("dev") + 1]


def test_offloads_can_be_disabled_and_enabled(pair: Lab) -> None:
    seen = []
    for on in (False, True):
        offloads.set_offloads(pair.node, "eth0", on)
        seen.append(offloads.enabled_offloads(pair.node, "eth0"))
    assert seen == [set(), set(offloads.OFFLOADS)]


def test_every_namespace_has_its_own_cookie(lab: Lab) -> None:
    own = netns.cookie()
    with netns.entered(lab.node.netns):
        of_node = netns.cookie()
    assert 0 not in (own, of_node)
    assert own != of_node
    assert netns.cookie() == own


def test_a_missing_namespace_cannot_be_entered_or_deleted() -> None:
    with pytest.raises(NotFound):
        netns.delete("ebpfproxy-test-nowhere")
    with pytest.raises(NotFound), netns.entered(netns.path("ebpfproxy-test-nowhere")):
        raise AssertionError


@pytest.fixture(scope="module")
def load(lab: Lab) -> Load:
    load = Load(lab.folder)
    load.serve(lab.pods["server"], 8080)
    return load


@pytest.mark.parametrize("mode", ["connect", "crr", "udp"])
@pytest.mark.parametrize("connected", [False, True])
def test_a_load_measures_each_connection(lab: Lab, load: Load, mode: str, connected: bool) -> None:
    server = lab.pods["server"]
    targets = load.targets("both-families", [(server.v4, 8080), (server.v6, 8080)])
    (samples,) = load.measure(lab.pods["client"], mode, targets, 200, connected=connected)
    assert len(samples) == 200
    assert 0 < min(samples) < 1_000_000_000


def test_two_lists_of_targets_are_used_alternately(lab: Lab, load: Load) -> None:
    server, client = lab.pods["server"], lab.pods["client"]
    targets = load.targets("turns", [(server.v4, 8080)], [(server.v6, 8080)])
    v4, v6 = load.measure(client, "connect", targets, 201)
    assert (len(v4), len(v6)) == (101, 100)


def test_measure_raises_at_an_error_and_churn_counts_it(lab: Lab, load: Load) -> None:
    server, client = lab.pods["server"], lab.pods["client"]
    targets = load.targets("half", [(server.v4, 8080), (server.v4, 9)])
    with pytest.raises(LoadFailed, match="port 9: Connection refused"):
        load.measure(client, "crr", targets, 200)
    report = load.churn(client, targets, count=200)
    assert report["attempts"] == 200
    assert report["errors"] == {"ECONNREFUSED": report["failed"]}
    assert 40 < report["failed"] < 160


def test_a_churn_runs_until_it_is_ended(lab: Lab, load: Load) -> None:
    targets = load.targets("one", [(lab.pods["server"].v4, 8080)])
    running = load.start_churn(lab.pods["client"], targets)
    load.churn(lab.pods["client"], targets, count=200)
    report = load.end_churn(running)
    assert report["attempts"] > 0
    assert report["failed"] == 0


def test_the_load_server_returns_the_address_it_was_reached_at(lab: Lab, load: Load) -> None:
    server = lab.pods["server"]

    def who() -> str:
        with sockets.dial(Protocol.TCP, server.v6, 8080) as connection:
            connection.sendall(b"w")
            return connection.recv(64).decode()

    assert lab.pods["client"].call(who) == server.v6
