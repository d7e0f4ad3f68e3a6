"""TCP connections through nft rules that are reset although conntrack does not know their sequence numbers:
with the client's or the endpoint's socket on this machine, and with neither.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ebpfproxy.backends.netfilter.tracked_connections import TrackedConnections
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.netns.netns import path
from ebpfproxy.model.address import Family
from tests.kernel.cluster import eventually
from tests.kernel.flowtable_here import needs_flowtables
from tests.kernel.nat_testbed import DNS, PATIENCE, TARGET, TCP, Testbed, end_all_flows

pytestmark = pytest.mark.kernel


@pytest.fixture(params=list(Family), ids=lambda of: of.value)
def testbed(request: pytest.FixtureRequest, testbeds: dict[Family, Testbed]) -> Iterator[Testbed]:
    made = testbeds[request.param]
    made.rules(dns=(made.at.vip, DNS, made.at.pods[0]))
    yield made
    end_all_flows(made)


@contextlib.contextmanager
def connection(testbed: Testbed) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sockets of the client and of the first pod. The second pod listens, too."""
    with contextlib.ExitStack() as stack:
        with testbed.pods.entered():
            first, _ = (
                stack.enter_context(socket.create_server((pod, TARGET), family=testbed.at.number))
                for pod in testbed.at.pods
            )
        with testbed.client.entered():
            client = socket.create_connection((testbed.at.vip, DNS), timeout=PATIENCE)
        stack.enter_context(client)
        server = stack.enter_context(first.accept()[0])
        server.settimeout(PATIENCE)
        client.sendall(b"?")
        assert server.recv(1) == b"?"
        yield client, server


def reset(testbed: Testbed, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[bool]:
    """Reset all connections of the node, on a machine that has only these network namespaces."""

    def opened(proc_root: str, run_netns: Sequence[str] = ()) -> Iterator[int]:
        for name in names:
            descriptor = os.open(path(name), os.O_RDONLY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    monkeypatch.setattr(namespaces, "opened_network_namespaces", opened)
    with testbed.node.entered():
        connections = TrackedConnections(Path("/proc"))
        return [succeeded for _, succeeded in connections.reset(list(connections.connections()))]


@pytest.mark.parametrize("where", ["client", "pods"])
def test_a_connection_with_one_socket_on_this_machine_ends_at_both_sides(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with connection(testbed) as (client, server):
        here = {"client": testbed.client, "pods": testbed.pods}[where]
        assert reset(testbed, monkeypatch, testbed.node.name, here.name) == [True]
        errors = {"client": (ConnectionAbortedError, ConnectionResetError)}
        of_client, of_server = errors.get(where, (ConnectionResetError, ConnectionAbortedError))
        with pytest.raises(of_client):
            client.recv(1)
        with pytest.raises(of_server):
            server.recv(1)


def test_a_connection_between_other_machines_ends_when_its_client_sends(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segment reaches another endpoint, which does not know the connection."""
    with connection(testbed) as (client, _):
        testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[1]))
        assert reset(testbed, monkeypatch, testbed.node.name) == [True]
        client.sendall(b"?")
        with pytest.raises(ConnectionResetError):
            client.recv(1)


@needs_flowtables
def test_a_connection_that_a_flowtable_has_is_reset(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an entry in a flowtable, the kernel does not report the state."""
    table = f"{testbed.at.nft} other"
    testbed.nft(
        f"table {table} {{ flowtable flows {{ hook ingress priority 0; devices = {{ out, inside }}; }}\n"
        "chain forward { type filter hook forward priority 0; ct state established flow add @flows; }; }"
    )
    try:
        with connection(testbed) as (client, _):
            assert [each.is_offloaded for each in testbed.flows(TCP)] == [True]
            testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[1]))
            assert reset(testbed, monkeypatch, testbed.node.name) == [True]
            client.sendall(b"?")
            with pytest.raises(ConnectionResetError):
                client.recv(1)
    finally:
        testbed.nft(f"delete table {table}")


def test_connections_that_have_ended_are_not_reset(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conntrack remembers them for two minutes."""
    with connection(testbed):
        pass
    assert testbed.flows(TCP)
    assert reset(testbed, monkeypatch) == []


def test_the_state_of_a_connection_is_read(testbed: Testbed) -> None:
    with connection(testbed) as (client, server):
        assert [each.tcp_state for each in testbed.flows(TCP)] == [conntrack.TCP_CONNTRACK_ESTABLISHED]
        server.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
        eventually(
            lambda: [each.tcp_state for each in testbed.flows(TCP)] == [conntrack.TCP_CONNTRACK_CLOSE_WAIT],
            "the acknowledgment of the end passes",
        )
