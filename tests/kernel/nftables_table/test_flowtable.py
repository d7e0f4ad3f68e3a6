"""The flowtable in the kernel: as it was written, with devices that come and go, and without it."""

import socket
import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.nftables import cleanup, table
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE, FlowtableDevice
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.service_plan import NodePlan
from tests.contract.test_backend import plan
from tests.kernel.flowtable_here import needs_flowtables
from tests.kernel.nftables_table.tables import Entries, bring, entries, listed, run_nft

pytestmark = [pytest.mark.kernel, needs_flowtables]

ON = NftablesSettings(flowtable=True)
LOCAL = frozenset({parse_network("192.0.2.10/32"), parse_network("2001:db8::10/128")})


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, timeout=60)


@pytest.fixture(autouse=True)
def _devices() -> None:
    ip("link add eth0 type veth peer name eth1")
    ip("link add veth0 type veth peer name veth1")


@pytest.fixture
def plane() -> Iterator[NftablesBackend]:
    made = NftablesBackend(ON)
    made.open()
    yield made
    made.close()


def with_devices(plane: NftablesBackend, *devices: str) -> Entries:
    of_plan = tuple((socket.if_nametoindex(device), device) for device in devices)
    return entries(plane, plan("web", "10.96.0.1"), node=NodePlan(LOCAL, LOCAL, flowtable_devices=of_plan))


def test_a_flowtable_is_listed_by_nft_and_read_back(plane: NftablesBackend) -> None:
    wanted = with_devices(plane, "eth0", "veth0")
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


def test_a_flowtable_exists_before_the_rules_of_a_large_change(
    plane: NftablesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules are then written in parts, before the other objects."""
    monkeypatch.setattr(table, "_LARGE", 1)
    wanted = with_devices(plane, "eth0", "veth0")
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()
    run_nft(
        f"flush chain ip {TABLE} flow-offload; delete flowtable ip {TABLE} services; "
        f"add flowtable ip {TABLE} services {{ hook ingress priority 5; devices = {{ eth0 }}; }}"
    )
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


def test_devices_are_added_and_removed(plane: NftablesBackend) -> None:
    for devices in (("eth0",), ("eth0", "veth0", "veth1"), ("veth1",), ()):
        wanted = with_devices(plane, *devices)
        assert not bring(plane, wanted)
        assert plane.read() == wanted == listed()


def test_a_device_that_is_gone_leaves_the_flowtable(plane: NftablesBackend) -> None:
    bring(plane, with_devices(plane, "eth0", "veth0"))
    ip("link delete veth0")
    wanted = with_devices(plane, "eth0")
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


def test_a_new_device_with_the_name_of_one_that_is_gone_is_added(plane: NftablesBackend) -> None:
    """The table was not read in between."""
    before = with_devices(plane, "eth0", "veth0")
    bring(plane, before)
    ip("link delete veth0")
    ip("link add veth0 type veth peer name veth1")
    after = with_devices(plane, "eth0", "veth0")
    assert before != after
    puts = {key: entry for key, entry in after.items() if before.get(key) != entry}
    assert set(puts) == {FlowtableDevice(of, "services", "veth0") for of in Family}
    assert not plane.apply(Delta(puts, frozenset()))
    assert plane.read() == after == listed()


def test_a_device_that_is_gone_is_the_only_one_that_is_rejected(plane: NftablesBackend) -> None:
    wanted = with_devices(plane, "eth0", "veth0")
    ip("link delete veth0")
    gone = {FlowtableDevice(of, "services", "veth0") for of in Family}
    assert bring(plane, wanted).keys() <= gone
    assert wanted.items() - plane.read().items() <= {(key, wanted[key]) for key in gone}


@pytest.mark.parametrize(
    "change",
    [
        f"delete flowtable ip {TABLE} services {{ devices = {{ veth0 }}; }}",
        f"flush chain ip {TABLE} flow-offload",
        f"flush chain ip {TABLE} flow-offload; delete flowtable ip {TABLE} services",
        f"add flowtable ip {TABLE} other {{ hook ingress priority 5; devices = {{ veth1 }}; }}",
        f"flush chain ip {TABLE} flow-offload; delete flowtable ip {TABLE} services; "
        f"add flowtable ip {TABLE} services {{ hook ingress priority 5; devices = {{ eth0, veth1 }}; }}",
    ],
)
def test_changes_by_other_programs_are_noticed_and_repaired(plane: NftablesBackend, change: str) -> None:
    wanted = with_devices(plane, "eth0", "veth0")
    bring(plane, wanted)
    before = plane.generation()
    run_nft(change)
    assert plane.generation() != before
    assert plane.read() != wanted
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


def test_without_the_option_the_flowtable_is_removed(plane: NftablesBackend) -> None:
    bring(plane, with_devices(plane, "eth0", "veth0"))
    off = NftablesBackend()
    off.open()
    wanted = with_devices(off, "eth0")
    assert not bring(off, wanted)
    assert off.read() == wanted == listed()
    off.close()


def test_kube_proxy_gets_the_table_without_the_flowtable(plane: NftablesBackend) -> None:
    bring(plane, with_devices(plane, "eth0"))
    removed = cleanup.remove_beside_kube_proxy(dry_run=True)
    assert {f"nftables table {of} kube-proxy: flowtable services" for of in ("ip", "ip6")} <= {*removed}
    cleanup.remove_beside_kube_proxy()
    left = {getattr(key, "name", "") for key in plane.read()}
    assert not left & {"flow-offload", "filter-forward-last", "flow-ips", "flow-nodeports"}
    assert not [key for key in plane.read() if isinstance(key, FlowtableDevice)]
