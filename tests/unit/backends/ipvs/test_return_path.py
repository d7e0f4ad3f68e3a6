"""The sysctls of the reverse path filter are set for endpoints, and restored from the note of kube-ipvs0."""

from types import SimpleNamespace

import pytest

from ebpfproxy.backends.ipvs import return_path
from ebpfproxy.errors import NotFound
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import dummy, links, owned_devices, routing
from ebpfproxy.model.address import Address, parse_address
from ebpfproxy.model.device import Device

ENDPOINT = parse_address("10.1.0.1")
LONGEST_NOTE = 255
UPLINK, POD = "eth0", "cali0000000001"


class Node:
    """The sysctls below net/ipv4/conf, without the directory, and kube-ipvs0."""

    def __init__(self) -> None:
        self.devices: dict[str, Device] = {}
        self.sysctls = {"all/accept_local": "0", "all/rp_filter": "1", "default/rp_filter": "1"}
        self.note: str | None = None
        self.routes: dict[Address, int] = {}
        self.add(UPLINK, "192.0.2.10")
        self.add(POD, leads_to=ENDPOINT)

    def add(self, name: str, *addresses: str, leads_to: Address | None = None) -> None:
        index = len(self.devices) + 1
        own = tuple(map(parse_address, addresses))
        self.devices[name] = Device(index, name, "veth", 1, True, addresses=own)
        self.sysctls[f"{name}/rp_filter"] = "1"
        if leads_to:
            self.routes[leads_to] = index

    def remove(self, name: str) -> None:
        del self.devices[name]
        del self.sysctls[f"{name}/rp_filter"]

    def read_devices(self) -> list[Device]:
        return list(self.devices.values())

    def route_to(self, address: Address) -> SimpleNamespace:
        return SimpleNamespace(ifindex=self.routes[address])

    def ensure_dummy(self, name: str) -> None:
        self.note = self.note or ""

    def read_note(self, name: str) -> str:
        if self.note is None:
            raise NotFound("no device")
        return self.note

    def set_note(self, name: str, note: str) -> None:
        assert len(note) <= LONGEST_NOTE
        self.note = note

    def read_sysctl(self, name: str) -> str:
        try:
            return self.sysctls[name.removeprefix("net/ipv4/conf/")]
        except KeyError:
            raise NotFound("the device is gone") from None

    def ensure_sysctl(self, name: str, value: str) -> bool:
        if self.read_sysctl(name) == value:
            return False
        self.sysctls[name.removeprefix("net/ipv4/conf/")] = value
        return True


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node()
    monkeypatch.setattr(links, "read", made.read_devices)
    monkeypatch.setattr(routing, "route_to", made.route_to)
    monkeypatch.setattr(dummy, "ensure", made.ensure_dummy)
    monkeypatch.setattr(owned_devices, "note", made.read_note)
    monkeypatch.setattr(owned_devices, "set_note", made.set_note)
    monkeypatch.setattr(sysctl, "read", made.read_sysctl)
    monkeypatch.setattr(sysctl, "ensure", made.ensure_sysctl)
    return made


def test_the_filter_is_off_towards_endpoints_and_loose_at_devices_with_an_address(node: Node) -> None:
    assert return_path.read([ENDPOINT]) is None
    return_path.ensure([ENDPOINT])
    assert node.sysctls == {
        "all/accept_local": "1",
        "all/rp_filter": "0",
        "default/rp_filter": "1",
        f"{UPLINK}/rp_filter": "2",
        f"{POD}/rp_filter": "0",
    }
    assert return_path.read([ENDPOINT]) is True


def test_the_values_before_the_first_change_are_restored(node: Node) -> None:
    before = dict(node.sysctls)
    return_path.ensure([ENDPOINT])
    node.sysctls[f"{UPLINK}/rp_filter"] = "1"
    return_path.ensure([ENDPOINT])
    assert return_path.restore()
    assert node.sysctls == before
    assert return_path.read([ENDPOINT]) is None
    assert not return_path.restore()


def test_a_note_that_is_too_short_has_the_devices_with_an_address(node: Node) -> None:
    """The others get the default when the values are restored."""
    for number in range(2, 22):
        node.add(f"cali{number:010}", leads_to=parse_address(f"10.1.0.{number}"))
    node.add("eth1", "198.51.100.10")
    before = dict(node.sysctls)
    return_path.ensure(node.routes)
    assert node.sysctls["cali0000000021/rp_filter"] == "0"
    assert node.note
    assert "cali0000000021" not in node.note
    for name in ("all/accept_local=0", "all/rp_filter=1", f"{UPLINK}/rp_filter=1", "eth1/rp_filter=1"):
        assert name in node.note.split()
    assert return_path.restore()
    assert node.sysctls == before


def test_a_device_that_is_gone_is_not_restored(node: Node) -> None:
    return_path.ensure([ENDPOINT])
    node.remove(UPLINK)
    assert return_path.restore()
    assert node.sysctls == {
        "all/accept_local": "0",
        "all/rp_filter": "1",
        "default/rp_filter": "1",
        f"{POD}/rp_filter": "1",
    }
