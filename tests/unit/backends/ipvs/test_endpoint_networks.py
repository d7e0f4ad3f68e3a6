"""What an agent reads in namespaces of endpoints; with devices: tests/kernel/test_ipvs_untranslated.py."""

import contextlib

import pytest

from ebpfproxy.backends.ipvs import endpoint_networks, return_path
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.entries import IpvsSettings, PodAddress, ReturnPath
from ebpfproxy.linux.netlink import owned_devices
from ebpfproxy.linux.netlink.owned_devices import DUMMY, OwnedDevice
from ebpfproxy.linux.netns import namespaces, netns
from ebpfproxy.model.address import Address, Family, parse_address

ENDPOINT, VIP = parse_address("fd00:1::1"), parse_address("2001:db8::1")
KEY = PodAddress(Family.IPV6, ENDPOINT, VIP)
ETH0, OWN = 2, 3


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network namespace of an endpoint that a previous run of the agent prepared."""
    note = f"{endpoint_networks.node_identity()} fd00:1::1 eth0"
    device = OwnedDevice("ebpv6-01234567", OWN, DUMMY, up=False, note=note)
    monkeypatch.setattr(namespaces, "network_namespaces", lambda: ["/run/netns/pod"])
    monkeypatch.setattr(netns, "entered", lambda path: contextlib.nullcontext())
    monkeypatch.setattr(owned_devices, "read", lambda *prefixes: [device])
    monkeypatch.setattr(owned_devices, "addresses", lambda: {ETH0: {ENDPOINT}, OWN: {VIP}})


@pytest.mark.usefixtures("pod")
def test_after_a_restart_the_sysctls_of_replies_are_restored_for_the_endpoints_that_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next sync puts the sysctls alone, since endpoints have what they should have."""
    ensured: list[frozenset[Address]] = []
    monkeypatch.setattr(return_path, "read", lambda endpoints: False)
    monkeypatch.setattr(return_path, "ensure", ensured.append)
    backend = IpvsBackend(IpvsSettings())
    drifted = ReturnPath(Family.IPV4)
    assert backend._read_untranslated(tuple(Family)) == {KEY: True, drifted: False}
    assert backend._put_untranslated([drifted]) == {}
    assert ensured == [{ENDPOINT}]
    backend._drop_untranslated([KEY])
    backend._put_untranslated([drifted])
    assert ensured[1] == frozenset()
