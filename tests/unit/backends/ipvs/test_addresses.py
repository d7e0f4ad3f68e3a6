"""Addresses of Services on kube-ipvs0 and in the set KUBE-IPVS-IPS, unless another device has them."""

from collections.abc import Collection, Iterable, Mapping
from typing import cast

import pytest

from ebpfproxy.backends.ipvs.addresses import Addresses
from ebpfproxy.backends.ipvs.entries import Entry, Key, Local, Member
from ebpfproxy.backends.ipvs.sets import IpSets, Rejections
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.netlink import dummy, local_addresses
from ebpfproxy.model.address import Address, Family, Network, family, format_address, parse_address

FREE, TAKEN = parse_address("203.0.113.1"), parse_address("192.0.2.10")
"""An address that no other device has, and one of another device."""


class Node:
    """Kube-ipvs0 (None: it does not exist), the members of the set, and the addresses of other devices."""

    def __init__(self) -> None:
        self.device: set[Address] | None = None
        self.members: dict[Key, Entry] = {}
        self.others = {TAKEN}
        self.addresses = Addresses(cast(IpSets, self))

    def put(self, address: Address) -> Rejections:
        return self.addresses.put([Local(family(address), address)])

    def drop(self, address: Address) -> Rejections:
        return self.addresses.drop([Local(family(address), address)])

    def read(self) -> dict[Address, Entry]:
        found = self.addresses.read(self.members, (Family.IPV4, Family.IPV6))
        return {key.address: entry for key, entry in found.items() if isinstance(key, Local)}

    def in_set(self) -> set[str]:
        return {key.text for key in self.members if isinstance(key, Member)}

    # What the kernel and ipset do

    def change(self, puts: Iterable[Member], drops: Iterable[Member]) -> Rejections:
        self.members.update(dict.fromkeys(puts, True))
        for each in drops:
            self.members.pop(each, None)
        return {}

    def ensure(self, name: str) -> None:
        self.device = self.device or set()

    def change_addresses(
        self, name: str, puts: Collection[Address], drops: Collection[Address]
    ) -> Mapping[Address, KernelError]:
        assert self.device is not None
        self.device = (self.device | set(puts)) - set(drops)
        return {}

    def on_device(self, name: str) -> frozenset[Address]:
        if self.device is None:
            raise NotFound("no device")
        return frozenset(self.device)

    def local(self) -> frozenset[Network]:
        return frozenset(Network(each, 128) for each in self.others)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node()
    monkeypatch.setattr(dummy, "ensure", made.ensure)
    monkeypatch.setattr(dummy, "exists", lambda name: made.device is not None)
    monkeypatch.setattr(dummy, "addresses", made.on_device)
    monkeypatch.setattr(dummy, "change_addresses", made.change_addresses)
    monkeypatch.setattr(local_addresses, "read", made.local)
    assert not made.read()
    return made


def test_an_address_is_put_on_kube_ipvs0_and_into_the_set(node: Node) -> None:
    assert not node.put(FREE)
    assert node.device == {FREE}
    assert node.in_set() == {format_address(FREE)}
    assert node.read() == {FREE: True}
    assert not node.drop(FREE)
    assert (node.device, node.in_set(), node.read()) == (set(), set(), {})


def test_an_address_of_another_device_is_not_put(node: Node) -> None:
    """It is local anyway, and its removal from kube-ipvs0 would cut the node off."""
    assert not node.put(TAKEN)
    assert (node.device, node.in_set()) == (None, set())
    assert node.read() == {TAKEN: True}


def test_an_address_that_another_device_gets_is_removed_from_kube_ipvs0(node: Node) -> None:
    node.put(FREE)
    node.others.add(FREE)
    assert node.read() == {FREE: False}
    node.put(FREE)
    assert (node.device, node.in_set()) == (set(), set())
    assert node.read() == {FREE: True}


def test_an_address_that_another_program_removed_is_found(node: Node) -> None:
    node.put(FREE)
    assert node.device
    node.device.clear()
    assert node.read() == {FREE: False}
    node.put(FREE)
    assert node.read() == {FREE: True}


def test_without_addresses_there_is_no_device(node: Node) -> None:
    node.put(TAKEN)
    assert not node.drop(TAKEN)
    assert node.device is None
