"""SCTP associations to Services whose endpoints have another port. Mode userspace relays no SCTP.

Many kernels have no SCTP sockets: there these tests are skipped, and run in the VMs of tests/vm.
"""

import itertools
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.lab.manifests import Object, port
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import FAMILIES, REFUSED, SILENT, Dial, converse, outcomes, socket_in
from tests.kernel.two_nodes import FRONTENDS, Everywhere, TwoNodes, name_and_client

SCTP = Protocol.SCTP
PORT, TARGET = 3868, 9899
_served: set[int] = set()
"""The ids of the clusters that have servers."""


def _lacks_sctp() -> bool:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, SCTP).close()
    except OSError:
        return True
    return False


pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(_lacks_sctp(), reason="this kernel has no SCTP"),
    pytest.mark.ways("ebpf-on", "ebpf-off", "nftables", "iptables", "ipvs"),
]
both_families = pytest.mark.parametrize("family", ["v4", "v6"])


class WithSctp(Everywhere):
    """Its NodePort of SCTP has the number of the other two."""

    def objects(self) -> list[Object]:
        service, *slices = super().objects()
        service["spec"]["ports"].append(port(PORT, name="sctp", protocol="SCTP", node_port=self.node_port))
        for each in slices:
            each["ports"].append(port(TARGET, name="sctp", protocol="SCTP"))
        return [service, *slices]

    def frontend(
        self, kind: str, family: str, protocol: Protocol, node: Pod | None = None
    ) -> tuple[str, int]:
        address, number = super().frontend(kind, family, Protocol.TCP, node)
        return address, number if kind == "NodePort" else PORT


@pytest.fixture
def sctp(two_nodes: TwoNodes) -> Iterator[TwoNodes]:
    """The cluster, whose servers listen on SCTP as well, each on one address. Otherwise the INIT ACK has the
    addresses of the pod, and after about two seconds the client sends a heartbeat to one of them, with the
    frontend's port. For the pod this packet belongs to no association. Its ABORT ends that of the client."""
    if id(two_nodes) not in _served:
        _served.add(id(two_nodes))
        for pod in (two_nodes.a, two_nodes.b, two_nodes.d):
            for address in (pod.v4, pod.v6):
                pod.serve_echo(SCTP, TARGET, address)
    yield two_nodes
    assert bad_crcs(two_nodes) == {}


def bad_crcs(cluster: TwoNodes) -> dict[str, int]:
    """By netns, the number of SCTP packets with a wrong CRC."""
    counted = {netns.name: netns.call(_bad_crcs) for netns in cluster.all_netns}
    return {name: count for name, count in counted.items() if count}


def _bad_crcs() -> int:
    with open("/proc/net/sctp/snmp") as lines:
        return int(dict(line.split() for line in lines)["SctpChecksumErrors"])


def web(cluster: TwoNodes, *endpoints: Pod, **spec: object) -> WithSctp:
    plain = cluster.service(node_port=True, **spec)
    made = WithSctp(cluster, plain.name, plain.v4, plain.v6, plain.node_port, plain.spec)
    return made.to(*endpoints)


def of(client: Pod, family: str, frontend: tuple[str, int], port_: int = 0) -> Dial:
    """A client that has only one address. Otherwise its INIT has all addresses, and the endpoint sends to all
    of them: the replies to addresses that no flow has are not translated, in no mode."""
    return Dial(SCTP, *frontend, source=(getattr(client, family), port_))


def name_of(client: Pod, family: str, frontend: tuple[str, int]) -> str:
    """The name of the endpoint that answers."""
    (answer,) = outcomes(client, [of(client, family, frontend)])
    return name_and_client(answer)[0]


def echoed(netns: Pod, family: str, frontend: tuple[str, int], payload: bytes) -> bytes:
    """What comes back, in messages of 1000 bytes."""

    def talk() -> bytes:
        with sockets.dial(SCTP, *frontend, source=(getattr(netns, family), 0)) as client:
            for at in range(0, len(payload), 1000):
                client.sendall(payload[at : at + 1000])
            received = bytearray()
            while len(received) < len(payload) and (chunk := client.recv(1 << 16)):
                received += chunk
        return bytes(received)

    return netns.call(talk, timeout=60)


@both_families
def test_all_frontends_reach_an_endpoint_with_another_port(sctp: TwoNodes, family: str) -> None:
    for pod in (sctp.a, sctp.d):
        served = web(sctp, pod)
        for client in (sctp.x, sctp.p, sctp.node):
            dials = [of(client, family, served.frontend(kind, family, SCTP)) for kind in FRONTENDS]
            answers = {name_and_client(each)[0] for each in outcomes(client, dials)}
            assert answers == {pod.name}, client.name


@both_families
def test_long_messages_arrive_unchanged(sctp: TwoNodes, family: str) -> None:
    """Packets of all lengths, bundled chunks and, where the kernel has it, segmentation offload."""
    payload = bytes(itertools.islice(itertools.cycle(range(251)), 60_000))
    for pod in (sctp.a, sctp.d):
        served = web(sctp, pod)
        for client in (sctp.x, sctp.p):
            frontend = served.frontend("NodePort" if client is sctp.x else "ClusterIP", family, SCTP)
            assert echoed(client, family, frontend, payload) == payload


@both_families
def test_crcs_that_the_stack_computes_are_right(sctp: TwoNodes, family: str) -> None:
    """Without offloads, the sender computes the CRC before any program sees the packet."""
    payload = bytes(itertools.islice(itertools.cycle(range(251)), 20_000))
    with sctp.without_offloads(*sctp.every_device()):
        for pod in (sctp.a, sctp.d):
            served = web(sctp, pod)
            for kind in ("NodePort", "ClusterIP"):
                assert echoed(sctp.x, family, served.frontend(kind, family, SCTP), payload) == payload


@both_families
def test_two_clients_with_one_port_are_masqueraded_with_different_ports(sctp: TwoNodes, family: str) -> None:
    served = web(sctp, sctp.d)
    address, number = served.frontend("ExternalIP", family, SCTP)
    first, second = (getattr(pair, family) for pair in sctp.lab.addresses.further(2))
    dials = [Dial(SCTP, address, number, source=(source, 21_000)) for source in (first, second)]
    assert [name_and_client(each)[0] for each in outcomes(sctp.x, dials)] == ["d", "d"]


@both_families
def test_an_endpoint_reaches_itself(sctp: TwoNodes, family: str) -> None:
    served = web(sctp, sctp.a)
    gateway = getattr(sctp.lab.addresses.gateway(0), family)
    assert outcomes(sctp.a, [of(sctp.a, family, (served.address(family), PORT))]) == [f"a {gateway}"]


@both_families
def test_without_endpoints_an_association_is_refused(sctp: TwoNodes, family: str) -> None:
    """Mode ebpf sends the ABORT of a closed port. Clients of the other modes get an ICMP error, as with
    kube-proxy, after which Linux sends the INIT again until it gives up."""
    served = web(sctp)
    timeout = sockets.ANSWERED if sctp.mode == "ebpf" else 0.5
    for kind in ("NodePort", "ClusterIP"):
        dial = of(sctp.x, family, served.frontend(kind, family, SCTP))._replace(timeout=timeout)
        expected = {REFUSED} if sctp.mode == "ebpf" else {REFUSED, SILENT}
        assert set(outcomes(sctp.x, [dial])) <= expected, kind


@both_families
def test_session_affinity_keeps_the_endpoint(sctp: TwoNodes, family: str) -> None:
    served = web(sctp, sctp.a, sctp.b, sctp.d, sessionAffinity="ClientIP")
    frontend = served.frontend("NodePort", family, SCTP)
    assert len({name_of(sctp.x, family, frontend) for _ in range(8)}) == 1


@both_families
def test_an_association_outlives_a_removed_endpoint(sctp: TwoNodes, family: str) -> None:
    """kube-proxy removes conntrack entries of UDP only. New associations go to another endpoint."""
    served = web(sctp, sctp.a)
    frontend = served.frontend("NodePort", family, SCTP)
    with socket_in(sctp.x, SCTP, FAMILIES[family]) as client:
        client.settimeout(sockets.ANSWERED)
        client.bind((getattr(sctp.x, family), 0))
        client.connect(frontend)
        assert name_and_client(converse(client))[0] == "a"
        served.to(sctp.b)
        assert name_of(sctp.x, family, frontend) == "b"
        assert name_and_client(converse(client))[0] == "a"
