"""NodePorts on loopback: the relay of the backend, and the rules that reject other protocols."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator, Mapping

import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.layers.sctp import SCTP, SCTPChunkInit

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.nftables import cleanup
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import Key, RelayKey
from ebpfproxy.backends.nftables.inspection import NftablesInspection
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.backends.userspace import relays
from ebpfproxy.backends.userspace.entries import Listen
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.model.counters import LocalhostCounts
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan
from tests.kernel.nftables_table.tables import run_nft
from tests.kernel.userspace_relay.conftest import plan

pytestmark = pytest.mark.kernel

SETTINGS = NftablesSettings(localhost=frozenset(Family))
NODE_PORT = 30080
ANY = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}


@pytest.fixture
def plane() -> Iterator[NftablesBackend]:
    netns.set_loopback_up()
    with contextlib.closing(NftablesBackend(SETTINGS)) as made:
        made.open()
        yield made


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """An endpoint, which accepts nothing."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def bring(plane: NftablesBackend, *plans: ServicePortPlan) -> Mapping[Key, KernelError]:
    return plane.apply(diff(plane.read(), plane.render(plans, NodePlan())))


def web(server: socket.socket, port: int = NODE_PORT) -> ServicePortPlan:
    return plan(server.getsockname(), at=[(ANY[Family.IPV4], port)])


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def counts(plane: NftablesBackend, family: Family) -> LocalhostCounts:
    (found,) = (
        each for each in plane.report().syncs if isinstance(each, LocalhostCounts) and each.family is family
    )
    return found


def test_a_reader_finds_what_the_backend_has_written(plane: NftablesBackend, server: socket.socket) -> None:
    assert not bring(plane, web(server))
    with contextlib.closing(NftablesInspection(SETTINGS)) as reader:
        reader.open()
        assert reader.read() == plane.read() == plane.render([web(server)], NodePlan())
    assert not bring(plane)
    assert not any(isinstance(key, RelayKey) for key in plane.read())


def test_a_check_finds_a_listener_that_another_program_has_destroyed(
    plane: NftablesBackend, server: socket.socket
) -> None:
    assert not bring(plane, web(server))
    assert all(plane.check({}))
    subprocess.run(
        ["ss", "--kill", "-tlnH", "sport", f"= :{NODE_PORT}"], check=True, stdout=subprocess.DEVNULL
    )
    assert not all(plane.check({}))
    assert not bring(plane, web(server))
    assert all(plane.check({}))
    assert listens(NODE_PORT)


def test_if_no_relay_can_be_started_only_its_entries_are_rejected(
    plane: NftablesBackend, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_module: str) -> None:
        raise Rejected("cannot start a process")

    with monkeypatch.context() as without_processes:
        without_processes.setattr(relays, "Child", fail)
        rejected = bring(plane, web(server))
        assert rejected
        assert all(isinstance(key, RelayKey) for key in rejected)
        assert "30080 : goto external-" in run_nft("list map ip kube-proxy service-nodeports")
    assert not bring(plane, web(server))
    assert listens(NODE_PORT)


def test_a_port_that_was_in_use_is_not_bound_after_the_service_has_another_one(
    plane: NftablesBackend, server: socket.socket
) -> None:
    with socket.create_server(("127.0.0.1", NODE_PORT)):
        (rejected,) = bring(plane, web(server)).items()
        assert isinstance(rejected[0], Listen)
        assert "127.0.0.1:30080" in rejected[1].message
        assert counts(plane, Family.IPV4)[1:3] == (0, 1)
        assert not bring(plane, web(server, NODE_PORT + 1))
    assert not bring(plane, plan(server.getsockname(), server.getsockname(), at=[("0.0.0.0", NODE_PORT + 1)]))
    assert listens(NODE_PORT + 1)
    assert not listens(NODE_PORT)
    assert counts(plane, Family.IPV4)[1:3] == (1, 1)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("number", [NODE_PORT, NODE_PORT + 1])
def test_packets_of_sctp_are_rejected_and_counted(
    plane: NftablesBackend, family: Family, number: int
) -> None:
    endpoint = {Family.IPV4: "10.1.0.1", Family.IPV6: "fd00::1"}[family]
    served = plan((endpoint, 80), protocol=Protocol.SCTP, at=[(ANY[family], NODE_PORT)])
    assert not bring(plane, served)
    init = SCTP(sport=4000, dport=number) / SCTPChunkInit(init_tag=1)
    packet = IP(dst="127.0.0.1") / init if family is Family.IPV4 else IPv6(dst="::1") / init
    kind = socket.AF_INET if family is Family.IPV4 else socket.AF_INET6
    with socket.socket(kind, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        sock.sendto(bytes(packet), (packet.dst, 0))
    expected = 1 if number == NODE_PORT else 0
    assert counts(plane, family).rejected_packets == {Protocol.UDP: 0, Protocol.SCTP: expected}


def test_after_kube_proxy_has_taken_the_table_over_its_remaining_objects_are_removed(
    plane: NftablesBackend,
) -> None:
    assert not bring(plane, plan(("10.1.0.1", 53), protocol=Protocol.UDP, at=[("0.0.0.0", NODE_PORT)]))
    plane.close()
    run_nft("flush chain ip kube-proxy nodeport-endpoints-check")
    removed = cleanup.remove_beside_kube_proxy()
    for name in ("set or map localhost-nodeports", "chain localhost-nodeport-rejected-udp"):
        assert f"nftables table ip kube-proxy: {name}" in removed
    assert "localhost" not in run_nft("list table ip kube-proxy")
