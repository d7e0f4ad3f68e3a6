"""A dummy device and its addresses in a separate namespace, compared with ip(8)."""

import json
import subprocess
from collections.abc import Iterable, Iterator

import pytest

from ebpfproxy.errors import AlreadyExists, NotFound, Rejected, Unsupported
from ebpfproxy.linux.netlink import dummy, local_addresses
from ebpfproxy.model.address import Address, format_address, format_network, parse_address
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

NAME = dummy.KUBE_IPVS0
BOTH = ("10.96.0.1", "fd00:96::1")


@pytest.fixture
def bare() -> Iterator[Namespace]:
    with namespace("dummy") as made, made.entered():
        yield made


@pytest.fixture
def node(bare: Namespace) -> Namespace:
    """A namespace with a dummy device that is down."""
    try:
        assert dummy.ensure(NAME)
    except Unsupported as unsupported:
        pytest.skip(unsupported.message)
    bare.ip("link set lo up")
    return bare


def texts(found: Iterable[Address]) -> set[str]:
    return {format_address(each) for each in found}


def parsed(*addresses: str) -> list[Address]:
    return [parse_address(each) for each in addresses]


def ip_json(*arguments: str) -> list[dict[str, object]]:
    """The output of ip(8) for the device, in the calling thread's network namespace."""
    done = subprocess.run(["ip", "-j", *arguments, "dev", NAME], capture_output=True, check=True)
    return [each for each in json.loads(done.stdout) if each]


def test_without_dummy_devices_the_hint_names_the_module(bare: Namespace) -> None:
    if not bare.lacks("link add try type dummy"):
        pytest.skip("this kernel has dummy devices")
    with pytest.raises(Unsupported) as raised:
        dummy.ensure(NAME)
    assert NAME in raised.value.message
    assert raised.value.hint == "modprobe dummy"


def test_a_device_of_another_kind_with_the_name_is_not_touched(bare: Namespace) -> None:
    bare.ip(f"link add {NAME} type veth peer name other")
    with pytest.raises(AlreadyExists, match=NAME):
        dummy.ensure(NAME)
    assert not dummy.exists(NAME)
    assert not dummy.remove(NAME)
    assert dummy.index(NAME)
    with pytest.raises(NotFound, match=NAME):
        dummy.addresses(NAME)


def test_reading_or_changing_a_missing_device_raises_not_found(bare: Namespace) -> None:
    assert not dummy.exists(NAME)
    assert not dummy.remove(NAME)
    with pytest.raises(NotFound, match=NAME):
        dummy.addresses(NAME)
    with pytest.raises(NotFound, match=NAME):
        dummy.change_addresses(NAME, parsed("10.96.0.1"))


def test_the_device_is_created_once_and_stays_down(node: Namespace) -> None:
    assert dummy.exists(NAME)
    assert not dummy.ensure(NAME)
    (link,) = ip_json("link", "show")
    assert link["operstate"] == "DOWN"
    assert dummy.addresses(NAME) == frozenset()


def test_removing_the_device_removes_its_addresses(node: Namespace) -> None:
    dummy.change_addresses(NAME, parsed(*BOTH))
    assert dummy.remove(NAME)
    assert not dummy.exists(NAME)
    assert dummy.ensure(NAME)
    assert dummy.addresses(NAME) == frozenset()


def test_addresses_are_host_addresses_without_duplicate_address_detection(node: Namespace) -> None:
    assert dummy.change_addresses(NAME, parsed(*BOTH)) == {}
    assert texts(dummy.addresses(NAME)) == set(BOTH)
    (device,) = ip_json("addr", "show")
    infos = device["addr_info"]
    assert isinstance(infos, list)
    assert {(info["local"], info["prefixlen"]) for info in infos} == {("10.96.0.1", 32), ("fd00:96::1", 128)}
    assert not any(info.get("tentative") or info.get("dadfailed") for info in infos)
    assert ip_json("-6", "route", "show", "table", "main") == []


def test_packets_to_its_addresses_are_local_although_the_device_is_down(node: Namespace) -> None:
    dummy.change_addresses(NAME, parsed(*BOTH))
    for address in BOTH:
        done = subprocess.run(["ip", "-j", "route", "get", address], capture_output=True, check=True)
        assert json.loads(done.stdout)[0]["type"] == "local", address


def test_its_addresses_are_excluded_from_node_port_addresses(node: Namespace) -> None:
    before = local_addresses.read()
    dummy.change_addresses(NAME, parsed(*BOTH))
    assert local_addresses.read() == before
    node.ip("link set lo down", f"addr add {BOTH[0]}/32 dev lo", "link set lo up")
    assert f"{BOTH[0]}/32" in {format_network(each) for each in local_addresses.read()}


def test_adding_existing_and_dropping_missing_entries_is_no_error(node: Namespace) -> None:
    dummy.change_addresses(NAME, parsed(*BOTH))
    assert dummy.change_addresses(NAME, parsed(*BOTH), parsed("10.96.0.2", "fd00:96::2")) == {}
    assert texts(dummy.addresses(NAME)) == set(BOTH)
    assert dummy.change_addresses(NAME, drop=parsed(*BOTH)) == {}
    assert dummy.addresses(NAME) == frozenset()


def test_an_invalid_address_is_rejected_and_the_others_are_added(node: Namespace) -> None:
    rejections = dummy.change_addresses(NAME, parsed("ff02::1", *BOTH, "::"))
    assert texts(rejections) == {"ff02::1", "::"}
    assert all(isinstance(error, Rejected) for error in rejections.values())
    assert "ff02::1" in rejections[parse_address("ff02::1")].message
    assert texts(dummy.addresses(NAME)) == set(BOTH)


def test_with_ipv6_disabled_the_hint_names_the_sysctl(node: Namespace) -> None:
    with open(f"/proc/sys/net/ipv6/conf/{NAME}/disable_ipv6", "w") as setting:
        setting.write("1")
    rejections = dummy.change_addresses(NAME, parsed(*BOTH))
    assert texts(rejections) == {BOTH[1]}
    assert "disable_ipv6" in rejections[parse_address(BOTH[1])].hint
    assert texts(dummy.addresses(NAME)) == {BOTH[0]}


def test_foreign_addresses_are_read_if_they_are_host_addresses(node: Namespace) -> None:
    node.ip(f"addr add 10.96.0.7/32 dev {NAME}", f"addr add 10.97.0.7/24 dev {NAME}", f"link set {NAME} up")
    node.ip("addr add 10.98.0.1/32 dev lo")
    assert texts(dummy.addresses(NAME)) == {"10.96.0.7"}


def test_thousands_of_addresses_are_added_and_removed_at_once(node: Namespace) -> None:
    wanted = [f"10.96.{number >> 8}.{number & 255}" for number in range(2000)]
    wanted += [f"fd00:96::{number:x}" for number in range(1, 2001)]
    assert dummy.change_addresses(NAME, parsed(*wanted)) == {}
    assert texts(dummy.addresses(NAME)) == set(wanted)
    assert dummy.change_addresses(NAME, drop=parsed(*wanted[1:])) == {}
    assert texts(dummy.addresses(NAME)) == {wanted[0]}
