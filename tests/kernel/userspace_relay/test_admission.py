"""Which clients a relay admits where a filter of the socket cannot tell."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.userspace.entries import Balanced, Balancing, Listening, Pods
from ebpfproxy.backends.userspace.relay import listening
from ebpfproxy.backends.userspace.relay.balancer import Affinity, Balancer
from ebpfproxy.backends.userspace.relay.listening import Admission, Client
from ebpfproxy.backends.userspace.relay.workload import Target
from ebpfproxy.linux.sockets.socket_filter import PASS
from ebpfproxy.model.address import Family, Protocol, parse_address, parse_network
from ebpfproxy.plan.service_plan import PlannedEndpoint, PlannedEndpoints
from tests.kernel.cluster import eventually
from tests.kernel.loopback import add_addresses
from tests.support.namespace import namespace

pytestmark = pytest.mark.kernel

SERVICE = Balanced(Family.IPV4, "default/web", Protocol.TCP)
ELSEWHERE = 4711
"""The ifindex of no device: loopback is 1."""
OPTMEM = Path("/proc/sys/net/core/optmem_max")


@pytest.fixture(autouse=True)
def _place() -> Iterator[None]:
    with namespace("admission") as made, made.entered():
        add_addresses("198.51.100.1", "fd00::1")
        yield


@pytest.fixture
def balancer() -> Balancer:
    endpoint = PlannedEndpoint(parse_address("10.0.0.1"), 80, True, True, True)
    return Balancer(Balancing(PlannedEndpoints([endpoint]).rows), Affinity(1), 0)


@pytest.mark.parametrize("nonlocal_bind", ["0", "1"])
def test_a_client_with_an_address_of_the_node_is_the_node(balancer: Balancer, nonlocal_bind: str) -> None:
    """Also if programs may bind every address, as keepalived needs it."""
    for family in ("ipv4", "ipv6"):
        Path(f"/proc/sys/net/{family}/ip_nonlocal_bind").write_text(nonlocal_bind)
    subject = Admission(Listening(SERVICE, 80, False, True, False), balancer)
    eventually(
        lambda: subject.scope(Client("fd00::1", ELSEWHERE)) is True, "the kernel has added the address"
    )
    for own in ("198.51.100.1", "127.0.0.9"):
        assert subject.scope(Client(own, ELSEWHERE)) is True, own
    for other in ("198.51.100.2", "fd00::2", "192.0.2.1", "fd01::1", "fe80::1%lo"):
        assert subject.scope(Client(other, ELSEWHERE)) is False, other


def test_ranges_whose_filter_takes_too_much_memory_are_checked_after_accept(balancer: Balancer) -> None:
    if not OPTMEM.exists():
        pytest.skip("the kernel has no limit for each network namespace (Linux 6.8)")
    ranges = tuple(parse_network(f"10.{number}.0.0/16") for number in range(200))
    entry = Listening(SERVICE, 80, False, False, False, ranges=ranges, node_admitted=False)
    subject = Admission(entry, balancer)
    assert subject.program != PASS
    OPTMEM.write_text("4096")
    with listening.bound(Target(socket.AF_INET, "127.0.0.1", 0), socket.SOCK_STREAM, subject) as sock:
        sock.listen()
        with socket.create_connection(sock.getsockname(), 10.0, ("127.0.0.5", 0)):
            assert sock.accept()[1][0] == "127.0.0.5"  # no filter
    assert subject.needs_interface
    assert subject.scope(Client("10.199.0.1", ELSEWHERE)) is False
    assert subject.scope(Client("10.200.0.1", ELSEWHERE)) is None
    assert subject.scope(Client("198.51.100.1", ELSEWHERE)) is None


def test_a_client_of_an_interface_that_is_gone_is_no_pod(balancer: Balancer) -> None:
    """Its connection arrived before the interface was removed."""
    subprocess.run(["ip", "link", "add", "cali1", "type", "veth", "peer", "name", "eth1"], check=True)
    pods = Pods(None, interface="cali", prefix=True)
    subject = Admission(Listening(SERVICE, 80, True, False, False, pods), balancer)
    for index, is_pod in (
        (socket.if_nametoindex("cali1"), True),
        (socket.if_nametoindex("eth1"), False),
        (ELSEWHERE, False),
    ):
        assert subject.scope(Client("192.0.2.1", index)) is is_pod
