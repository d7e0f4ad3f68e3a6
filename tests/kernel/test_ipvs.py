"""Virtual and real servers in a separate namespace, compared with ipvsadm(8), and used by connections."""

import socket
import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.ipvs.messages import (
    Connections,
    Flag,
    Listed,
    Method,
    RealServer,
    ServerKey,
    VirtualServer,
)
from ebpfproxy.model.address import Family, Protocol, parse_address
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

NONE = Connections(0, 0)
VIRTUAL = {Family.IPV4: "10.96.0.1", Family.IPV6: "fd00:96::1"}
REAL = {Family.IPV4: "10.1.0.{}", Family.IPV6: "fd00:1::{}"}
SCHEDULERS = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh")


def missing() -> Unsupported | None:
    try:
        ipvs.available()
    except Unsupported as unsupported:
        return unsupported
    return None


@pytest.fixture
def bare() -> Iterator[Namespace]:
    with namespace("ipvs") as made, made.entered():
        yield made


@pytest.fixture
def node(bare: Namespace) -> Namespace:
    unsupported = missing()
    if unsupported is not None:
        pytest.skip(unsupported.message)
    bare.ip("link set lo up")
    return bare


@pytest.fixture(params=list(Family), ids=lambda of: of.value)
def of(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


@pytest.fixture(params=list(Protocol), ids=lambda protocol: protocol.name)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return Protocol(request.param)


def key(of: Family = Family.IPV4, protocol: Protocol = Protocol.TCP, port: int = 258) -> ServerKey:
    """The default port's two bytes differ, so that a wrong byte order is found."""
    return ServerKey(parse_address(VIRTUAL[of]), port, protocol)


def real(number: int, of: Family = Family.IPV4, port: int = 8081, weight: int = 1) -> RealServer:
    return RealServer(parse_address(REAL[of].format(number)), port, weight)


def apply(*operations: ipvs.Operation) -> None:
    assert ipvs.apply(operations) == []


def rejected(operation: ipvs.Operation) -> KernelError:
    ((position, error),) = ipvs.apply([operation])
    assert position == 0
    return error


def saved() -> set[str]:
    """The lines of ipvsadm(8) --save in the calling thread's network namespace."""
    output = subprocess.run(["ipvsadm", "--save", "--numeric"], capture_output=True, text=True, check=True)
    return {" ".join(line.split()) for line in output.stdout.splitlines()}


def tool(*arguments: str) -> None:
    subprocess.run(["ipvsadm", *arguments], check=True)


OPTIONS = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}


def address_and_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def test_without_ipvs_the_hint_names_the_module(bare: Namespace) -> None:
    unsupported = missing()
    if unsupported is None:
        pytest.skip("this kernel has IPVS")
    assert "IPVS" in unsupported.message
    assert unsupported.hint == "modprobe ip_vs"
    with pytest.raises(Unsupported):
        ipvs.read()
    with pytest.raises(Unsupported):
        ipvs.apply([ipvs.delete_server(key())])
    with pytest.raises(Unsupported):
        ipvs.probe_scheduler("rr")
    assert ipvs.fingerprint() == b""


def test_a_new_namespace_has_no_virtual_servers(node: Namespace) -> None:
    assert ipvs.read() == {}
    apply()


def test_written_servers_are_read_back_and_listed_by_ipvsadm(
    node: Namespace, of: Family, protocol: Protocol
) -> None:
    name, virtual = key(of, protocol), VirtualServer(key(of, protocol), "rr")
    apply(
        ipvs.add_server(virtual),
        ipvs.add_real(name, real(1, of)),
        ipvs.add_real(name, real(2, of, weight=0)),
    )
    wanted = Listed(virtual, {real(1, of): NONE, real(2, of, weight=0): NONE})
    assert ipvs.read() == {name: wanted}
    assert ipvs.read_one(name) == wanted
    at = f"{OPTIONS[protocol]} {address_and_port(VIRTUAL[of], 258)}"
    assert saved() == {
        f"-A {at} -s rr",
        f"-a {at} -r {address_and_port(REAL[of].format(1), 8081)} -m -w 1",
        f"-a {at} -r {address_and_port(REAL[of].format(2), 8081)} -m -w 0",
    }


def test_servers_created_by_ipvsadm_are_read(node: Namespace, of: Family) -> None:
    at = ["-t", address_and_port(VIRTUAL[of], 258)]
    netmask = {Family.IPV4: "255.255.255.0", Family.IPV6: "64"}[of]
    tool("-A", *at, "-s", "mh", "-p", "1234", "-M", netmask, "-b", "mh-port,mh-fallback")
    tool("-a", *at, "-r", address_and_port(REAL[of].format(1), 8081), "-w", "7", "-g")
    tool("-a", *at, "-r", address_and_port(REAL[of].format(2), 9), "-w", "65535", "-i")
    flags = Flag.PORT | Flag.FALLBACK
    virtual = VirtualServer(key(of), "mh", flags, 1234, 24 if of is Family.IPV4 else 64)
    reals = {
        real(1, of, 258, 7)._replace(method=Method.DIRECT): NONE,  # direct routing keeps the port
        real(2, of, 258, 65535)._replace(method=Method.TUNNEL): NONE,
    }
    assert ipvs.read() == {key(of): Listed(virtual, reals)}
    assert ipvs.read_one(key(of)) == Listed(virtual, reals)


VIRTUALS = {
    "persistent": VirtualServer(key(), "rr", Flag(0), 10800),
    "persistent by network": VirtualServer(key(), "rr", Flag(0), 300, 24),
    "persistent by network, IPv6": VirtualServer(key(Family.IPV6), "rr", Flag(0), 300, 64),
    "persistent, IPv6": VirtualServer(key(Family.IPV6), "rr", Flag(0), 1),
    "mh by port": VirtualServer(key(), "mh", Flag.PORT),
    "sh with a fallback": VirtualServer(key(), "sh", Flag.FALLBACK | Flag.PORT),
    "packet by packet": VirtualServer(key(protocol=Protocol.UDP), "rr", Flag.ONE_PACKET),
}


@pytest.mark.parametrize("kind", VIRTUALS)
def test_flags_and_persistence_are_read_back_and_can_be_changed(node: Namespace, kind: str) -> None:
    virtual = VIRTUALS[kind]
    plain = VirtualServer(virtual.key, "wrr")
    apply(ipvs.add_server(virtual), ipvs.add_real(virtual.key, real(1, of_key(virtual.key))))
    before = ipvs.read()[virtual.key]
    assert before.server == virtual
    apply(ipvs.change_server(plain))
    assert ipvs.read()[virtual.key] == Listed(plain, before.reals)
    apply(ipvs.change_server(virtual))
    assert ipvs.read() == {virtual.key: before}


def of_key(name: ServerKey) -> Family:
    return next(of for of, address in VIRTUAL.items() if parse_address(address) == name.address)


def test_changing_a_real_server_changes_only_its_weight(node: Namespace, of: Family) -> None:
    apply(
        ipvs.add_server(VirtualServer(key(of), "rr")),
        *(ipvs.add_real(key(of), real(each, of)) for each in (1, 2)),
    )
    apply(ipvs.change_real(key(of), real(1, of, weight=0)))
    assert set(ipvs.read()[key(of)].reals) == {real(1, of, weight=0), real(2, of)}
    apply(ipvs.change_real(key(of), real(1, of, weight=3)))
    assert set(ipvs.read()[key(of)].reals) == {real(1, of, weight=3), real(2, of)}


def test_only_the_named_server_is_deleted(node: Namespace, of: Family) -> None:
    other = key(of, Protocol.UDP)
    apply(
        ipvs.add_server(VirtualServer(key(of), "rr")),
        ipvs.add_server(VirtualServer(other, "rr")),
        *(ipvs.add_real(key(of), real(1, of, port)) for port in (80, 81)),
    )
    apply(ipvs.delete_real(key(of), real(1, of).address, 80))
    assert set(ipvs.read()[key(of)].reals) == {real(1, of, 81)}
    apply(ipvs.delete_server(key(of)))
    assert set(ipvs.read()) == {other}
    apply(ipvs.delete_server(other))
    assert ipvs.read() == {}


def test_errors_for_existing_and_missing_servers_name_the_operation(node: Namespace, of: Family) -> None:
    virtual, missing_server = VirtualServer(key(of), "rr"), VirtualServer(key(of, Protocol.UDP), "rr")
    apply(ipvs.add_server(virtual), ipvs.add_real(key(of), real(1, of)))
    rejections = {
        ipvs.add_server(virtual): AlreadyExists,
        ipvs.add_real(key(of), real(1, of)): AlreadyExists,
        ipvs.change_server(missing_server): NotFound,
        ipvs.delete_server(missing_server.key): NotFound,
        ipvs.add_real(missing_server.key, real(1, of)): NotFound,
        ipvs.change_real(key(of), real(2, of)): NotFound,
        ipvs.delete_real(key(of), real(2, of).address, 8081): NotFound,
        ipvs.delete_real(missing_server.key, real(1, of).address, 8081): NotFound,
    }
    for operation, kind in rejections.items():
        error = rejected(operation)
        assert type(error) is kind, operation
        assert str(operation) in error.message
    with pytest.raises(NotFound, match="UDP"):
        ipvs.read_one(missing_server.key)
    assert ipvs.read() == {key(of): Listed(virtual, {real(1, of): NONE})}


def test_a_rejected_operation_does_not_stop_the_others(node: Namespace) -> None:
    """The requests need more than one datagram. The kernel runs modprobe for each unknown scheduler."""
    names = [key(port=port) for port in range(1, 301)]
    bad = [each.port % 7 == 0 for each in names]
    servers = map(VirtualServer, names, ["nosuch" if wrong else "rr" for wrong in bad])
    rejections = ipvs.apply([ipvs.add_server(each) for each in servers])
    assert [position for position, _ in rejections] == [at for at, wrong in enumerate(bad) if wrong]
    assert all(isinstance(error, Unsupported) for _, error in rejections)
    assert rejections[0].error.hint == "modprobe ip_vs_nosuch"
    assert f"{names[6]}" in rejections[0].error.message
    assert set(ipvs.read()) == {each for each, wrong in zip(names, bad, strict=True) if not wrong}


def test_invalid_weights_and_prefixes_are_rejected(node: Namespace) -> None:
    apply(ipvs.add_server(VirtualServer(key(), "rr")))
    heavy = ipvs.add_real(key(), real(1, weight=1 << 31))
    prefix_0 = ipvs.add_server(VirtualServer(key(Family.IPV6), "rr", Flag(0), 60, 0))
    rejections = ipvs.apply([heavy, prefix_0])
    assert [type(error) for _, error in rejections] == [Rejected, Rejected]
    assert set(ipvs.read()) == {key()}


def test_virtual_servers_by_firewall_mark_are_ignored(node: Namespace) -> None:
    tool("-A", "-f", "7", "-s", "rr", "-p", "60")
    tool("-a", "-f", "7", "-r", "10.1.0.1", "-g")
    assert ipvs.read() == {}
    apply(ipvs.add_server(VirtualServer(key(), "rr")), ipvs.add_real(key(), real(2)))
    assert ipvs.read() == {key(): Listed(VirtualServer(key(), "rr"), {real(2): NONE})}


def test_a_virtual_server_with_hundreds_of_real_servers_is_read_completely(
    node: Namespace, of: Family
) -> None:
    wanted = [real(each, of, port) for port in (80, 81, 82) for each in range(1, 100)]
    apply(ipvs.add_server(VirtualServer(key(of), "rr")), *(ipvs.add_real(key(of), each) for each in wanted))
    assert set(ipvs.read()[key(of)].reals) == set(wanted)
    assert ipvs.read_one(key(of)) == ipvs.read()[key(of)]


def test_timeouts_of_0_keep_the_current_value(node: Namespace) -> None:
    assert ipvs.timeouts() == (900, 120, 300)
    ipvs.set_timeouts(ipvs.Timeouts(1000, 0, 0))
    assert ipvs.timeouts() == (1000, 120, 300)
    ipvs.set_timeouts(ipvs.Timeouts(0, 77, 88))
    assert ipvs.timeouts() == ipvs.Timeouts(tcp=1000, tcp_fin=77, udp=88)
    ipvs.set_timeouts(ipvs.Timeouts(0, 0, 0))
    assert ipvs.timeouts() == (1000, 77, 88)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_probing_a_kernel_scheduler_succeeds_and_leaves_no_server(node: Namespace, name: str) -> None:
    ipvs.probe_scheduler(name)
    assert ipvs.read() == {}


def test_probing_an_unknown_scheduler_raises_unsupported(node: Namespace) -> None:
    with pytest.raises(Unsupported, match="no scheduler nosuch") as raised:
        ipvs.probe_scheduler("nosuch")
    assert raised.value.hint == "modprobe ip_vs_nosuch"
    assert ipvs.read() == {}


def test_a_server_left_by_a_previous_probe_is_removed(node: Namespace) -> None:
    tool("-A", "-t", "198.51.100.0:20000", "-s", "wlc")
    ipvs.probe_scheduler("rr")
    assert ipvs.read() == {}


def test_every_change_changes_the_fingerprint(node: Namespace, of: Family) -> None:
    virtual = VirtualServer(key(of), "rr")
    steps = (
        ipvs.add_server(virtual),
        ipvs.add_real(key(of), real(1, of)),
        ipvs.add_real(key(of), real(2, of)),
        ipvs.change_real(key(of), real(2, of, weight=0)),
        ipvs.change_server(virtual._replace(scheduler="wrr")),
        ipvs.change_server(virtual._replace(persistence=600)),
        ipvs.change_server(virtual._replace(persistence=600, prefix=16)),
        ipvs.delete_real(key(of), real(1, of).address, 8081),
    )
    seen = {ipvs.fingerprint()}
    for step in steps:
        apply(step)
        seen.add(ipvs.fingerprint())
        assert ipvs.fingerprint() in seen
    assert len(seen) == len(steps) + 1


LOOPBACK = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}
NUMBERS = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


@pytest.fixture
def serving(node: Namespace, of: Family) -> Iterator[RealServer]:
    """A listening real server on this node, with a virtual server for it."""
    suffix = 32 if of is Family.IPV4 else 128
    node.ip(f"addr add {VIRTUAL[of]}/{suffix} dev lo" + (" nodad" if suffix == 128 else ""))
    with socket.create_server((LOOPBACK[of], 0), family=NUMBERS[of]) as listening:
        real_server = RealServer(parse_address(LOOPBACK[of]), listening.getsockname()[1])
        apply(ipvs.add_server(VirtualServer(key(of), "rr")), ipvs.add_real(key(of), real_server))
        yield real_server


def dial(of: Family) -> socket.socket:
    return socket.create_connection((VIRTUAL[of], 258), timeout=10)


def test_connections_are_counted_and_do_not_change_the_fingerprint(
    node: Namespace, of: Family, serving: RealServer
) -> None:
    before = ipvs.fingerprint()
    with dial(of), dial(of):
        found = ipvs.read()[key(of)]
        assert found.reals == {serving: Connections(2, 0)}
        assert found.connections == 2
        assert ipvs.read_one(key(of)).reals == {serving: Connections(2, 0)}
        assert ipvs.fingerprint() == before
        assert ipvs.proc_text() != b""


def test_changes_keep_connections_and_weight_0_accepts_no_new_ones(
    node: Namespace, of: Family, serving: RealServer
) -> None:
    with dial(of) as client:
        apply(ipvs.change_real(key(of), serving._replace(weight=0)))
        apply(ipvs.change_server(VirtualServer(key(of), "wrr")))
        assert ipvs.read()[key(of)].reals == {serving._replace(weight=0): Connections(1, 0)}
        client.sendall(b"still there")
        with pytest.raises(OSError):
            dial(of)


def test_namespaces_have_separate_servers(node: Namespace) -> None:
    apply(ipvs.add_server(VirtualServer(key(), "rr")), ipvs.add_real(key(), real(1)))
    first = ipvs.fingerprint()
    with namespace("ipvs-other") as other, other.entered():
        assert ipvs.read() == {}
        assert ipvs.fingerprint() != first


def test_all_real_servers_are_read_beside_those_of_other_namespaces(node: Namespace) -> None:
    """A kernel with one table for all namespaces then omits virtual servers in proc, if the text is longer
    than a page. Linux 7.3 has a table for each namespace."""
    keys = [key(port=port) for port in range(1000, 1100)]

    def add() -> None:
        apply(
            *(
                each
                for of in keys
                for each in (ipvs.add_server(VirtualServer(of, "rr")), ipvs.add_real(of, real(1)))
            )
        )

    with namespace("ipvs-other") as other, other.entered():
        other.ip("link set lo up")
        add()
        with node.entered():
            add()
            found = ipvs.read()
    assert found == {of: Listed(VirtualServer(of, "rr"), {real(1): NONE}) for of in keys}
