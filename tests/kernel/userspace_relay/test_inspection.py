"""What relays answer to other commands about one connection."""

import socket

import pytest

from ebpfproxy.backends.userspace.inspection import UserspaceInspection
from ebpfproxy.model.address import Protocol, parse_address
from ebpfproxy.model.connection import Connection, Translation
from ebpfproxy.plan.service_plan import PlanContext
from tests.kernel.userspace_relay.conftest import ADDRESS, PORT, Place, plan

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
