"""XDP of devices, as netlink describes it."""

import struct

import pytest

from ebpfproxy.linux.netlink import links, netlink, rtnetlink, xdp
from ebpfproxy.model.device import ETHERNET

_NONE = 65534  # ARPHRD_NONE
_MAC = bytes.fromhex("020000000001")


def _u32(value: int) -> bytes:
    return struct.pack("=I", value)


def _link(ifindex: int, name: str, kind: str = "", type_: int = ETHERNET, *more: bytes) -> bytes:
    head = rtnetlink.LINK.pack(0, type_, ifindex, rtnetlink.IFF_UP, 0)
    named = netlink.attribute(rtnetlink.IFLA_IFNAME, name.encode() + b"\0")
    address = netlink.attribute(rtnetlink.IFLA_ADDRESS, _MAC)
    info = netlink.attribute(rtnetlink.IFLA_LINKINFO, netlink.attribute(1, kind.encode() + b"\0"))
    return head + named + address + (info if kind else b"") + b"".join(more)


def _xdp(**programs: int) -> bytes:
    kinds = {"native": 5, "generic": 6, "offloaded": 7}
    attached = netlink.attribute(2, b"\1")
    return netlink.attribute(
        43, attached + b"".join(netlink.attribute(kinds[mode], _u32(n)) for mode, n in programs.items())
    )


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[int, xdp.XdpDevice]:
    payloads = [
        _link(2, "eth0", "", ETHERNET, _xdp(native=71)),
        _link(3, "eth0.5", "vlan", ETHERNET, netlink.attribute(rtnetlink.IFLA_LINK, _u32(2))),
        _link(4, "veth1", "veth", ETHERNET, netlink.attribute(rtnetlink.IFLA_LINK, _u32(3))),
        _link(5, "wg0", "wireguard", _NONE),
        _link(6, "eth1", "", ETHERNET, _xdp(generic=72, offloaded=73)),
    ]
    monkeypatch.setattr(links, "all_links", lambda: list(map(rtnetlink.link, payloads)))
    return xdp.devices()


def test_devices_have_their_programs_by_mode(found: dict[int, xdp.XdpDevice]) -> None:
    assert found[2] == xdp.XdpDevice(2, "eth0", "", _MAC, {"native": 71}, True)
    assert found[6].programs == {"generic": 72, "offloaded": 73}
    assert found[4].programs == {}


def test_only_devices_below_vlan_devices_have_vlans(found: dict[int, xdp.XdpDevice]) -> None:
    """The peer of a veth device is no VLAN device."""
    assert {ifindex for ifindex, device in found.items() if device.has_vlans} == {2}


def test_devices_without_ethernet_are_left_out(found: dict[int, xdp.XdpDevice]) -> None:
    assert 5 not in found


def test_a_kernel_without_the_family_netdev_reports_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> list[bytes]:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(netlink, "get", absent)
    assert xdp.features() == {}
