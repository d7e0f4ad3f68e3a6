"""What relays answer to other commands about one connection."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from ebpfproxy.backends.userspace.entries import UserspaceSettings
from ebpfproxy.backends.userspace.inspection import UserspaceInspection, connections
from ebpfproxy.model.address import Protocol, parse_address
from ebpfproxy.model.connection import Connection, Translation
from ebpfproxy.plan.service_plan import PlanContext
from tests.kernel.cluster import eventually
from tests.kernel.userspace_relay.conftest import ADDRESS, PORT, Place, plan
from tests.support.confined import as_nobody

pytestmark = pytest.mark.kernel

FRONTEND = parse_address(ADDRESS), PORT


def endpoint_of(client: socket.socket, protocol: Protocol = Protocol.TCP) -> Translation | None:
    host, port = client.getsockname()
    connection = Connection(protocol, (parse_address(host), port), FRONTEND)
    return UserspaceInspection(PlanContext("node")).endpoint_of(connection)


def test_each_connection_and_flow_has_its_endpoint(place: Place) -> None:
    servers = [place.echo(f"127.0.0.{n}") for n in (2, 3)]
    place.serve(plan(*servers))
    expected = {Translation((parse_address(host), port)) for host, port in servers}
    clients = [place.connect() for _ in range(6)]
    assert {endpoint_of(each) for each in clients} == expected
    datagrams = place.udp("127.0.0.4")
    place.serve(plan(datagrams.getsockname(), protocol=Protocol.UDP))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((ADDRESS, PORT))
        client.send(b"?")
        host, port = datagrams.getsockname()
        assert endpoint_of(client, Protocol.UDP) == Translation((parse_address(host), port))
        assert endpoint_of(client) is None


def test_the_answer_waits_while_a_relay_tries_endpoints(place: Place) -> None:
    """The endpoint drops each SYN, as its queue is full. In the end the relay resets the connection."""
    server = place.listen(backlog=0)
    with socket.create_connection(server.getsockname(), 10.0):
        place.serve(plan(server.getsockname()))
        client = place.connect()
        assert endpoint_of(client) is None
        client.setblocking(False)
        with pytest.raises(ConnectionResetError):
            client.recv(1)


_FAKE = """
import pathlib, socket
from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.messages import Connection, Connections
last = int(pathlib.Path("/proc/sys/kernel/ns_last_pid").read_text())
full = socket.socket(socket.AF_UNIX)
full.bind("\\0ebpfproxy-relay-full")
full.listen(0)
clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
for each in clients:
    each.setblocking(False)
    each.connect_ex("\\0ebpfproxy-relay-full")
taken = []
for pid in range(last, last + 500):
    taken.append(socket.socket(socket.AF_UNIX))
    taken[-1].bind(f"\\0ebpfproxy-relay-{pid}")
fake = socket.socket(socket.AF_UNIX)
fake.bind("\\0ebpfproxy-relay-fake")
fake.listen()
print("ready", flush=True)
while True:
    client, _ = fake.accept()
    client.sendall(messages.encode(Connections([Connection("default/fake", "TCP", "a:1", "b:1", "c:1", 0)])))
"""


@pytest.mark.parametrize("settings", [UserspaceSettings(relays=1)])
def test_processes_of_other_users_are_no_relays(place: Place) -> None:
    """Bug: the address of a relay was its process ID, so another user could bind it first, and the relay did
    not start. Other commands believed the answers at any such address."""
    place.serve(plan(place.named("127.0.0.2")))
    command = [*as_nobody(), sys.executable, "-c", _FAKE]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as fake:
        try:
            assert fake.stdout
            assert fake.stdout.readline() == b"ready\n"
            place.connect()
            assert {each.service for each in connections(9)} <= {"default/web"}
            os.kill(place.backend.relays.pids()[0], signal.SIGKILL)
            eventually(lambda: place.backend.relays.replaced == 1, "the relay is replaced")
            assert place.answer() == "127.0.0.2"
        finally:
            fake.kill()
