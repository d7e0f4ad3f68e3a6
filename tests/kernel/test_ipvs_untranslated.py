"""What mode ipvs changes for untranslated packets: in namespaces of endpoints, and sysctls of the node.

IPVS itself is not needed, but dummy devices and tunnels are, which kernels of container hosts often lack.
"""

import socket
import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ipvs import endpoint_networks, return_path
from ebpfproxy.backends.ipvs.endpoint_networks import EndpointNetworks
from ebpfproxy.backends.ipvs.entries import EndpointKey, PodAddress, Tunnel
from ebpfproxy.errors import Rejected, Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import dummy, owned_devices
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Family, parse_address
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

BOTH = tuple(Family)
OWN = {Family.IPV4: "10.99.7.5", Family.IPV6: "fd99:7::5"}
VIP = {Family.IPV4: "203.0.113.7", Family.IPV6: "2001:db8::7"}
NOWHERE = "10.99.7.6"


def address_of(family: Family, endpoint: str = "") -> PodAddress:
    return PodAddress(family, parse_address(endpoint or OWN[family]), parse_address(VIP[family]))


def tunnel_of(family: Family) -> Tunnel:
    return Tunnel(family, parse_address(OWN[family]))


ALL: list[EndpointKey] = [each(family) for family in Family for each in (address_of, tunnel_of)]


@pytest.fixture
def pod() -> Iterator[Namespace]:
    """The network namespace of an endpoint."""
    with namespace("endpoint") as made:
        made.ip("link set lo up", "link add eth0 type veth peer name eth1", "link set eth0 up")
        made.ip(f"addr add {OWN[Family.IPV4]}/24 dev eth0", f"addr add {OWN[Family.IPV6]}/64 dev eth0 nodad")
        with made.entered():
            for name in ("arp_ignore", "arp_announce"):
                sysctl.ensure(f"net/ipv4/conf/all/{name}", "0")
            for kind, local in (("dummy", None), ("ipip", "192.0.2.1"), ("ip6tnl", "2001:db8::1")):
                try:
                    owned_devices.create("ebp-tried", kind, parse_address(local) if local else None)
                except Unsupported as lack:
                    pytest.skip(lack.message)
                owned_devices.delete("ebp-tried")
        yield made


def arp(pod: Namespace) -> tuple[str, str]:
    with pod.entered():
        names = ("arp_ignore", "arp_announce")
        ignore, announce = (sysctl.read(f"net/ipv4/conf/eth0/{name}") for name in names)
    return ignore, announce


def names(pod: Namespace) -> set[str]:
    with pod.entered():
        return {each.name.partition("-")[0] for each in owned_devices.read("ebp")}


def test_an_endpoint_gets_addresses_and_tunnels_and_loses_them(pod: Namespace) -> None:
    networks = EndpointNetworks()
    assert networks.put(ALL) == {}
    assert networks.read(BOTH) == dict.fromkeys(ALL, True)
    assert EndpointNetworks().read(BOTH) == dict.fromkeys(ALL, True)  # another run reads the same
    assert names(pod) == {"ebpv4", "ebpv6", "ebpt4", "ebpt6"}
    assert arp(pod) == ("1", "2")
    assert networks.drop(ALL) == {}
    assert networks.read(BOTH) == {}
    assert names(pod) == set()
    assert arp(pod) == ("0", "0")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("addr del 203.0.113.7/32 dev {ebpv4}", address_of(Family.IPV4)),
        ("link del {ebpv6}", address_of(Family.IPV6)),
        ("link set {ebpt4} down", tunnel_of(Family.IPV4)),
        ("link del {ebpt6}", tunnel_of(Family.IPV6)),
        ("addr flush dev {ebpt4}", tunnel_of(Family.IPV4)),
    ],
)
def test_a_change_by_others_is_read_and_restored(pod: Namespace, change: str, key: EndpointKey) -> None:
    networks = EndpointNetworks()
    networks.put(ALL)
    with pod.entered():
        devices = {each.name.partition("-")[0]: each.name for each in owned_devices.read("ebp")}
    pod.ip(change.format(**devices))
    found = networks.read(BOTH)
    assert not found.pop(key, False)
    assert found == {each: True for each in ALL if each != key}
    assert networks.put([key]) == {}
    assert networks.read(BOTH) == dict.fromkeys(ALL, True)


def test_a_changed_sysctl_is_read_and_restored(pod: Namespace) -> None:
    networks = EndpointNetworks()
    networks.put(ALL)
    with pod.entered():
        sysctl.ensure("net/ipv4/conf/eth0/arp_ignore", "0")
    assert networks.read(BOTH)[address_of(Family.IPV4)] is False
    networks.put([address_of(Family.IPV4)])
    assert arp(pod) == ("1", "2")


def test_an_endpoint_without_a_namespace_is_not_an_error(
    pod: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    networks = EndpointNetworks()
    key = address_of(Family.IPV4, NOWHERE)
    assert networks.put([key]) == {}
    assert networks.read(BOTH) == {key: True}
    assert caplog.text.count(endpoint_networks.NO_NAMESPACE) == 1
    pod.ip(f"addr add {NOWHERE}/24 dev eth0")
    assert networks.read(BOTH) == {}  # now it differs
    networks.put([key])
    assert networks.read(BOTH) == {key: True}


def test_an_address_of_an_open_connection_lingers(pod: Namespace) -> None:
    networks = EndpointNetworks()
    networks.put(ALL)
    vip = VIP[Family.IPV4]
    with pod.entered(), socket.create_server((vip, 8080)) as server:
        client = socket.create_connection((vip, 8080), timeout=10)
        served, _ = server.accept()
    with client, served:
        networks.drop(ALL)
        assert networks.read(BOTH) == {}
        assert "ebpv4" in names(pod)
        (path,) = endpoint_networks.leftovers()
        assert endpoint_networks.remove(path, only_unused=True) == {parse_address(vip)}
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    networks.release()
    assert names(pod) == set()
    assert networks.read(BOTH) == {}


def test_a_refused_removal_is_retried(pod: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = EndpointNetworks()
    networks.put(ALL)
    vip = VIP[Family.IPV4]
    with pod.entered(), socket.create_server((vip, 8080)) as server:
        client = socket.create_connection((vip, 8080), timeout=10)
        served, _ = server.accept()
    networks.drop(ALL)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    served.close()

    def refuse(name: str) -> bool:
        raise Rejected(f"cannot delete the device {name}: Device or resource busy")

    with monkeypatch.context() as patched:
        patched.setattr(owned_devices, "delete", refuse)
        networks.release()
        assert "ebpv4" in names(pod)
        assert networks.read(BOTH) == {}  # still not an entry
    networks.release()
    assert names(pod) == set()


def test_a_namespace_that_cannot_be_read_may_have_devices(
    pod: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    EndpointNetworks().put(ALL)  # of a previous run
    networks = EndpointNetworks()

    def fail(*prefixes: str) -> list[owned_devices.OwnedDevice]:
        raise Rejected("cannot read the network devices: Interrupted system call")

    with monkeypatch.context() as patched:
        patched.setattr(owned_devices, "read", fail)
        assert networks.read(BOTH) == {}
    assert networks.read(BOTH) == dict.fromkeys(ALL, True)


def test_cleanup_removes_everything_at_once(pod: Namespace) -> None:
    EndpointNetworks().put(ALL)
    (path,) = endpoint_networks.leftovers()
    assert endpoint_networks.remove(path) == set()
    assert endpoint_networks.leftovers() == []
    assert (names(pod), arp(pod)) == (set(), ("0", "0"))


@pytest.mark.parametrize("family", Family)
def test_cleanup_removes_a_device_whose_creation_was_interrupted(
    pod: Namespace, monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    def end(name: str, text: str) -> None:
        raise Rejected(f"cannot set the alias of the device {name}: Interrupted system call")

    with monkeypatch.context() as patched:
        patched.setattr(owned_devices, "set_note", end)
        assert EndpointNetworks().put([address_of(family)]).keys() == {address_of(family)}
    assert names(pod) != set()
    (path,) = endpoint_networks.leftovers()
    endpoint_networks.remove(path)
    assert names(pod) == set()


@pytest.fixture
def node() -> Iterator[None]:
    """A node with a strict reverse path filter, and a pod behind a device without an address."""
    with netns.throw_away():
        try:
            dummy.ensure(KUBE_IPVS0)
        except Unsupported as lack:
            pytest.skip(lack.message)
        for name in ("all", "default"):
            sysctl.ensure(f"net/ipv4/conf/{name}/rp_filter", "1")
        for command in (
            "link set lo up",
            *(f"link add {each} type veth peer name {each}p" for each in ("eth0", "veth1", "veth2")),
            *(f"link set {each} up" for each in ("eth0", "veth1", "veth2", "eth0p", "veth1p", "veth2p")),
            "addr add 192.0.2.1/24 dev eth0",
            "route add 10.99.7.5/32 dev veth1",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield


def filters() -> dict[str, str]:
    names = ("all", "default", "eth0", "veth1", "veth2")
    return {name: sysctl.read(f"net/ipv4/conf/{name}/rp_filter") for name in names}


@pytest.mark.usefixtures("node")
def test_only_the_devices_of_replies_lose_the_strict_filter() -> None:
    endpoints = {parse_address(OWN[Family.IPV4])}
    before = filters()
    assert return_path.read(endpoints) is None
    return_path.ensure(endpoints)
    assert filters() == {"all": "0", "default": "1", "eth0": "2", "veth1": "0", "veth2": "1"}
    assert sysctl.read("net/ipv4/conf/all/accept_local") == "1"
    assert return_path.read(endpoints) is True
    subprocess.run(["ip", "route", "add", "10.99.7.6/32", "dev", "veth2"], check=True)
    endpoints.add(parse_address(NOWHERE))
    assert return_path.read(endpoints) is False
    return_path.ensure(endpoints)
    assert filters()["veth2"] == "0"
    assert return_path.restore()
    assert filters() == before
    assert sysctl.read("net/ipv4/conf/all/accept_local") == "0"
    assert return_path.read(endpoints) is None


@pytest.mark.usefixtures("node")
def test_a_device_with_an_address_is_restored_beside_those_of_many_pods() -> None:
    """The note has no room for all of them."""
    endpoints = set()
    for number in range(20):
        for command in (
            f"link add cali{number:08} type veth peer name peer{number}",
            f"link set cali{number:08} up",
            f"link set peer{number} up",
            f"route add 10.99.8.{number}/32 dev cali{number:08}",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        endpoints.add(parse_address(f"10.99.8.{number}"))
    before = filters()
    return_path.ensure(endpoints)
    assert filters()["eth0"] == "2"
    assert sysctl.read("net/ipv4/conf/cali00000019/rp_filter") == "0"
    return_path.restore()
    assert filters() == before
    assert sysctl.read("net/ipv4/conf/cali00000019/rp_filter") == "1"
