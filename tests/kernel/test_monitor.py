"""Live events of real connections, their filters, what is lost, and that nothing is recorded without a
reader."""

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.inspect.events import LEASE, Event, EventReader
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.errors import CLOSED, AlreadyExists
from ebpfproxy.lab import Netns
from ebpfproxy.linux.bpf.bpf import Map
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, connected, converse, outcome, socket_in
from tests.kernel.cluster import Cluster, Exposed, elsewhere, eventually
from tests.support.otlp_receiver import receiving

pytestmark = [pytest.mark.kernel, pytest.mark.backends("ebpf")]

STICKY = {
    "sessionAffinity": "ClientIP",
    "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}},
}


class Watched:
    """A reader of the events of one Service, or of all."""

    def __init__(self, reader: EventReader) -> None:
        self.reader = reader
        self.found: list[Event] = []

    def events(self) -> list[Event]:
        """All events so far."""
        self.reader.read(self.found.append)
        return self.found

    def await_one(self, **wanted: str) -> Event:
        """The first event with these fields."""

        def matching() -> list[Event]:
            fields = wanted.items()
            return [e for e in self.events() if all(getattr(e, name) == value for name, value in fields)]

        eventually(lambda: bool(matching()), f"an event with {wanted}; there are {self.found}", 10)
        return matching()[0]


@contextlib.contextmanager
def watching(cluster: Cluster, web: Exposed | None = None, **filters: Any) -> Iterator[Watched]:
    service = f"default/{web.name}" if web else ""
    with contextlib.closing(EventReader(cluster.lab.bpffs, service, **filters)) as reader:
        yield Watched(reader)


def monitor_entry(cluster: Cluster) -> dict[str, Any]:
    with contextlib.closing(Map.pinned(Pins(cluster.lab.bpffs).hooked_in() / "maps" / "monitor")) as opened:
        value = opened.lookup(struct.pack("=I", 0))
    assert value is not None
    return dict(zip((field.name for field in abi.MONITOR.fields), abi.MONITOR.unpack(value), strict=True))


@pytest.mark.parametrize("family", ["v4", "v6"])
@pytest.mark.parametrize("client", ["pod", "node"])
def test_a_connection_of_a_socket(cluster: Cluster, client: str, family: str) -> None:
    web = cluster.service().to(cluster.a)
    netns = cluster.client(client)
    with watching(cluster, web) as watched:
        before = time.time()
        assert outcome(netns, TCP, web.address(family), 80) == "a"
        event = watched.await_one(event="new")
    frontend, endpoint = (web.v4, cluster.a.v4) if family == "v4" else (f"[{web.v6}]", f"[{cluster.a.v6}]")
    assert event._replace(time=0) == Event(
        *(0, "new", f"default/{web.name}:tcp", "TCP", "socket", "node" if client == "node" else netns.v4),
        *(f"{frontend}:80", f"{endpoint}:8080", "", ""),
    )
    assert before - 1 <= event.time <= time.time() + 1


def test_datagrams_of_an_unconnected_socket_are_one_event(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a)
    with watching(cluster, web) as watched, socket_in(cluster.p, UDP) as sock:
        sock.settimeout(5)
        for _ in range(3):
            sock.sendto(b"?", (web.v4, 53))
            sock.recv(100)
        watched.await_one(event="new", protocol="UDP", endpoint=f"{cluster.a.v4}:5353")
        assert len(watched.events()) == 1


def test_a_connection_from_outside(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    outside = cluster.lab.outside
    with watching(cluster, web) as watched:
        assert outcome(outside, TCP, cluster.node.v4, web.node_port) == "a"
        event = watched.await_one(event="new", path="packet")
    assert event.client.startswith(f"{outside.v4}:")
    assert (event.frontend, event.endpoint) == (f"{cluster.node.v4}:{web.node_port}", f"{cluster.a.v4}:8080")


def test_rejected_connections(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to()
    with watching(cluster, web) as watched:
        assert outcome(cluster.p, TCP, web.v4, 80) == REFUSED
        socket_event = watched.await_one(event="rejected", path="socket")
        assert outcome(cluster.lab.outside, TCP, cluster.node.v4, web.node_port) == REFUSED
        packet_event = watched.await_one(event="rejected", path="packet")
        assert outcome(cluster.lab.outside, UDP, cluster.node.v4, web.node_port) == REFUSED
        watched.await_one(event="rejected", path="packet", protocol="UDP")
    assert {(each.reason, each.endpoint) for each in (socket_event, packet_event)} == {("no-endpoints", "")}


def test_a_connection_that_the_traffic_policy_drops(cluster: Cluster) -> None:
    web = cluster.service(node_port=True, type="NodePort", externalTrafficPolicy="Local")
    web.to(elsewhere(cluster.a))
    with watching(cluster, web) as watched:
        assert outcome(cluster.lab.outside, TCP, cluster.node.v4, web.node_port, 0.3) == SILENT
        event = watched.await_one(event="dropped")
    assert (event.path, event.reason) == ("packet", "no-local-endpoints")


def test_a_connection_outside_the_source_ranges(cluster: Cluster) -> None:
    web = cluster.service(type="LoadBalancer", loadBalancerSourceRanges=["192.0.2.0/24"])
    web.status = {"loadBalancer": {"ingress": [{"ip": "10.98.77.1"}]}}
    web.to(cluster.a)
    with watching(cluster, web) as watched:
        assert outcome(cluster.p, TCP, "10.98.77.1", 80, 0.3) == SILENT
        event = watched.await_one(event="dropped")
    assert (event.reason, event.client.rpartition(":")[0]) == ("source-refused", cluster.p.v4)


def test_a_reset_of_an_established_flow(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    with (
        watching(cluster, web) as watched,
        connected(cluster.lab.outside, TCP, cluster.node.v4, web.node_port) as sock,
    ):
        assert converse(sock) == "a"
        sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: close() sends a reset
        sock.close()
        event = watched.await_one(event="reset")
    assert (event.reason, event.endpoint) == ("by-client", f"{cluster.a.v4}:8080")
    assert event.frontend == f"{cluster.node.v4}:{web.node_port}"


def test_a_reset_of_an_endpoint_without_a_listener(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.q)
    with watching(cluster, web) as watched:
        assert outcome(cluster.lab.outside, TCP, cluster.node.v4, web.node_port) == REFUSED
        event = watched.await_one(event="reset")
    assert (event.reason, event.endpoint) == ("by-endpoint", f"{cluster.q.v4}:8080")


@pytest.mark.parametrize("path", ["socket", "packet"])
def test_session_affinity(cluster: Cluster, path: str) -> None:
    web = cluster.service(node_port=True).to(cluster.a, cluster.b, **STICKY)
    client: Netns = cluster.p if path == "socket" else cluster.lab.outside
    to = (web.v4, 80) if path == "socket" else (cluster.node.v4, web.node_port)
    with watching(cluster, web) as watched:
        for _ in range(3):
            outcome(client, TCP, *to)
        eventually(lambda: len(watched.events()) == 3, "three events")
    assert [(each.path, each.affinity) for each in watched.found] == [
        (path, "set"),
        (path, "used"),
        (path, "used"),
    ]
    assert len({each.endpoint for each in watched.found}) == 1


def test_a_reconnected_socket(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, web.v4, 53) as sock, watching(cluster, web) as watched:
        assert converse(sock) == "a"
        web.to(cluster.b)
        event = watched.await_one(event="reconnected")
    assert (event.protocol, event.endpoint) == ("UDP", f"{cluster.b.v4}:5353")


def test_filters(cluster: Cluster) -> None:
    web, other = cluster.service(node_port=True).to(cluster.a), cluster.service().to(cluster.b)
    with watching(cluster, web, client=cluster.p.v4, kinds=("new",)) as watched:
        outcome(cluster.p, TCP, other.v4, 80)
        outcome(cluster.q, TCP, web.v4, 80)
        outcome(cluster.node, TCP, web.v4, 80)
        outcome(cluster.lab.outside, TCP, cluster.node.v4, web.node_port)
        outcome(cluster.p, TCP, web.v4, 80)
        outcome(cluster.p, UDP, web.v4, 53)
        watched.await_one(service=f"default/{web.name}:udp")
    assert [(each.service, each.client) for each in watched.found] == [
        (f"default/{web.name}:tcp", cluster.p.v4),
        (f"default/{web.name}:udp", cluster.p.v4),
    ]


def connect_often(address: str, count: int) -> None:
    """Begin that many connections to port 80, without waiting for answers."""
    for _ in range(count):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect((address, 80))


def test_events_over_the_rate_are_counted(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a)
    with watching(cluster, web, rate=5) as watched:
        cluster.p.call(lambda: connect_often(web.v4, 40))
        lost = watched.reader.lost()
        shown = len(watched.events())
    assert lost.rate > 0
    assert (shown + lost.rate, lost.buffer) == (40, 0)


def test_events_without_room_are_counted(cluster: Cluster) -> None:
    """The reader does not read. An event has 88 bytes with its header."""
    web = cluster.service().to(cluster.a)
    room = abi.CONSTANTS["EVENTS_SIZE"] // (abi.EVENT.size + 8)
    attempts = room + 500
    with watching(cluster, web) as watched:
        cluster.p.call(lambda: connect_often(web.v4, attempts))
        lost = watched.reader.lost()
        shown = len(watched.events())
    assert (shown + lost.buffer, lost.rate) == (attempts, 0)
    assert room - 2 <= shown <= room
    assert lost.buffer >= 500


def test_only_one_reader_runs(cluster: Cluster) -> None:
    with (
        watching(cluster),
        pytest.raises(AlreadyExists, match="another monitor or top"),
        watching(cluster),
    ):
        pass
    with watching(cluster):
        pass


def test_nothing_is_recorded_without_a_reader(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a)
    with watching(cluster, web):
        assert monitor_entry(cluster)["until"] > time.monotonic_ns()
    assert monitor_entry(cluster)["until"] == 0
    before = monitor_entry(cluster)
    outcome(cluster.p, TCP, web.v4, 80)
    assert monitor_entry(cluster) == before
    with watching(cluster, web) as watched:
        assert watched.events() == []


def test_a_killed_reader_leaves_nothing(cluster: Cluster) -> None:
    """After its deadline, the next event clears it."""
    web = cluster.service().to(cluster.a)
    with started(cluster) as process:
        process.kill()
        process.wait()
    until = monitor_entry(cluster)["until"]
    assert until <= time.monotonic_ns() + LEASE * 1e9
    eventually(lambda: time.monotonic_ns() > until, "the deadline passes")
    outcome(cluster.p, TCP, web.v4, 80)
    assert monitor_entry(cluster)["until"] == 0


@contextlib.contextmanager
def started(cluster: Cluster, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """The command, once it reads events. It is killed at the end of the block, unless it has ended."""
    assert monitor_entry(cluster)["until"] == 0
    command = [sys.executable, "-m", "ebpfproxy", "monitor", f"--bpffs-root={cluster.lab.bpffs}", *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            eventually(lambda: monitor_entry(cluster)["until"] > 0, "the command reads events")
            yield process
        finally:
            process.kill()


def test_the_command_writes_json_lines(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a)
    with started(cluster, "-o", "json", "--count=2", f"--service=default/{web.name}") as process:
        for _ in range(3):
            outcome(cluster.p, TCP, web.v4, 80)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [(row["event"], row["client"]) for row in rows] == [("new", cluster.p.v4)] * 2


def test_the_command_ends_at_an_interrupt(cluster: Cluster) -> None:
    web = cluster.service().to()
    with started(cluster, "--verdict=rejected", f"--service=default/{web.name}:tcp") as process:
        outcome(cluster.p, TCP, web.v4, 80)
        assert process.stdout
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert line.split()[1:] == [
        *("rejected", f"default/{web.name}:tcp", "TCP", cluster.p.v4, "->", f"{web.v4}:80", "no-endpoints"),
    ]
    assert monitor_entry(cluster)["until"] == 0


def test_the_command_exports_events_instead_of_printing_them(cluster: Cluster) -> None:
    web, other = cluster.service().to(), cluster.service().to(cluster.a)
    flags = (f"--service=default/{web.name}", "--verdict=rejected", "--count=1")
    with receiving() as receiver, started(cluster, f"--otlp={receiver.url}", *flags) as process:
        outcome(cluster.p, TCP, other.v4, 80)
        outcome(cluster.p, TCP, web.v4, 80)
        output = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, ("", ""))
    (record,) = receiver.records
    assert record.event_name == "ebpfproxy.connection.rejected"
    assert record.severity == "WARN"
    assert record.attributes == {
        "client.address": cluster.p.v4,
        "server.address": web.v4,
        "server.port": 80,
        "network.transport": "tcp",
        "network.type": "ipv4",
        "k8s.namespace.name": "default",
        "k8s.service.name": web.name,
        "ebpfproxy.service.port": "tcp",
        "ebpfproxy.path": "socket",
        "error.type": "no-endpoints",
    }


def test_the_command_exports_what_is_queued_at_sigterm(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BLRP_SCHEDULE_DELAY", "600000")  # no batch is sent before
    web = cluster.service().to(cluster.a)
    flags = ("-o", "text", f"--service=default/{web.name}")
    with receiving() as receiver, started(cluster, f"--otlp={receiver.url}", *flags) as process:
        outcome(cluster.p, TCP, web.v4, 80)
        assert process.stdout
        assert process.stdout.readline().split()[1] == "new"
        assert not receiver.records
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert [each.event_name for each in receiver.records] == ["ebpfproxy.connection.new"]


def test_the_command_shows_lost_events_also_if_it_exports_them(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a)
    flags = ("-o", "json", "--rate=5", f"--service=default/{web.name}")
    with receiving() as receiver, started(cluster, f"--otlp={receiver.url}", *flags) as process:
        receiver.status = 400
        cluster.p.call(lambda: connect_often(web.v4, 40))
        assert process.stderr
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    rows = [json.loads(line) for line in output.splitlines()]
    shown = [row for row in rows if row["event"] == "new"]
    assert f"cannot export events: {receiver.url}/v1/logs: HTTP 400 Bad Request" in line
    assert rows[-1]["event"] == "lost"
    assert rows[-1]["rate"] == 40 - len(shown)
    assert rows[-1]["export"] > len(shown)  # also the record of the events over the rate


def test_the_command_ends_with_the_reader_of_its_output(cluster: Cluster) -> None:
    web = cluster.service().to(cluster.a)
    with started(cluster) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        outcome(cluster.p, TCP, web.v4, 80)
        assert process.wait(timeout=30) == CLOSED
        assert process.stderr.read() == ""


def test_without_mode_ebpf_the_command_names_the_remedy(cluster: Cluster) -> None:
    """The folder has no maps, as in the other modes."""
    empty = cluster.lab.folder
    command = [sys.executable, "-m", "ebpfproxy", "monitor", f"--bpffs-root={empty}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 4
    assert "events need mode ebpf" in done.stderr
    assert "--proxy-mode=ebpf" in done.stderr
