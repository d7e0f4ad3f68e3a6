"""--socket-lb: which sockets connect to an endpoint, and which clients' packets are translated instead.

/proc/net has the actual peer of a socket. The result of getpeername() is rewritten by a BPF program.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.lab import Lab, Pod, sockets
from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, UDP, connected, converse, outcome
from tests.kernel.cluster import TCP_TARGET, Cluster, Exposed
from tests.support import datagrams

pytestmark = [pytest.mark.kernel, pytest.mark.parametrize("mode", ["host", "off"], indirect=True)]

SERVED = {"host": {"node"}, "off": set[str]()}
"""The clients whose sockets the socket path serves, by mode."""

CLIENTS = pytest.mark.parametrize("kind", ["pod", "node"])
FAMILIES = pytest.mark.parametrize("family", ["v4", "v6"])


@pytest.fixture(scope="module")
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def separate(mode: str) -> Iterator[Cluster]:
    with Lab(f"test-lb-{mode}", {"host": 30, "off": 31}[mode]) as lab, Cluster(lab) as made:
        made.start(f"--socket-lb={mode}", "--sync-period=1s")
        yield made


@pytest.fixture(scope="module")
def web(separate: Cluster) -> Exposed:
    return separate.service(node_port=True).to(separate.a)


def actual_peer(client: Pod, family: str, address: str, port: int) -> str:
    """The actual peer of the client's TCP connection to that address: "address:port", in the kernel's hex."""

    def look() -> str:
        with sockets.dial(TCP, address, port) as dialed:
            local = f":{dialed.getsockname()[1]:04X}"
            table = Path("/proc/net/tcp6" if family == "v6" else "/proc/net/tcp").read_text()
            (line,) = (words for words in map(str.split, table.splitlines()) if words[1].endswith(local))
            return line[2]

    return client.call(look)


def as_in_proc(family: str, address: str, port: int) -> str:
    raw = socket.inet_pton(socket.AF_INET6 if family == "v6" else socket.AF_INET, address)
    words = (raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return f"{b''.join(words).hex().upper()}:{port:04X}"


@CLIENTS
@FAMILIES
def test_every_client_reaches_the_service(
    mode: str, separate: Cluster, web: Exposed, kind: str, family: str
) -> None:
    client, address = separate.client(kind), web.address(family)
    assert outcome(client, TCP, address, 80) == "a"
    assert outcome(client, UDP, address, 53) == "a"
    answer, peer = client.call(lambda: datagrams.ask_unconnected(address, 53))
    assert (answer, peer) == ("a", (address, 53))


@CLIENTS
@FAMILIES
def test_only_sockets_of_the_served_clients_connect_to_the_endpoint(
    mode: str, separate: Cluster, web: Exposed, kind: str, family: str
) -> None:
    client, address = separate.client(kind), web.address(family)
    endpoint = separate.a.v6 if family == "v6" else separate.a.v4
    expected = (endpoint, TCP_TARGET) if kind in SERVED[mode] else (address, 80)
    assert actual_peer(client, family, address, 80) == as_in_proc(family, *expected)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_node_port_answers_the_node_on_its_loopback(
    mode: str, separate: Cluster, web: Exposed, address: str, protocol: Protocol
) -> None:
    """Regression: on the packet path ::1 did not answer, since bpf_fib_lookup() finds no route from ::1."""
    assert outcome(separate.node, protocol, address, web.node_port) == "a"


def test_the_node_can_bind_a_node_port_only_without_socket_hooks(
    mode: str, separate: Cluster, web: Exposed
) -> None:
    def bind() -> bool:
        with socket.socket() as bound:
            try:
                bound.bind(("0.0.0.0", web.node_port))
            except OSError:
                return False
        return True

    assert separate.node.call(bind) is (mode == "off")


def test_socket_hooks_are_attached_only_if_they_serve_clients(mode: str, separate: Cluster) -> None:
    attached = {hook.name for hook in SOCKET_HOOKS if cgroup.programs(separate.lab.cgroup, hook.attach_type)}
    assert attached == ({hook.name for hook in SOCKET_HOOKS} if SERVED[mode] else set())


@CLIENTS
def test_a_socket_connected_to_an_endpoint_works_after_socket_lb_is_turned_off(
    mode: str, separate: Cluster, web: Exposed, kind: str
) -> None:
    client = separate.client(kind)
    separate.start("--socket-lb=on", "--sync-period=1s")
    with connected(client, TCP, web.v4, 80) as stream, connected(client, UDP, web.v4, 53) as datagrams:
        assert (converse(stream), converse(datagrams)) == ("a", "a")
        separate.start(f"--socket-lb={mode}", "--sync-period=1s")
        assert (converse(stream), converse(datagrams)) == ("a", "a")
        assert outcome(client, TCP, web.v4, 80) == "a"
