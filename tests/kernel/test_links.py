"""Devices of a separate namespace, read and watched."""

import queue
import threading
from collections.abc import Iterator

import pytest

from ebpfproxy.linux.netlink import links, rtnetlink_watch
from ebpfproxy.model.address import format_address, format_network
from ebpfproxy.model.device import ETHERNET, LOOPBACK, Device
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

RAW_IP, TUNNEL = 0xFFFE, 768  # ARPHRD_NONE, ARPHRD_TUNNEL

Devices = dict[str, Device]


@pytest.fixture
def bare() -> Iterator[Namespace]:
    """A new namespace without changes."""
    with namespace("links") as made:
        yield made


@pytest.fixture
def node(bare: Namespace) -> Namespace:
    """A namespace with loopback up, and a veth pair n0 and n1, both up and without addresses."""
    bare.ip("link set lo up", "link add n0 type veth peer name n1")
    bare.ip("link set n0 addrgenmode none", "link set n1 addrgenmode none")
    bare.ip("link set n0 up", "link set n1 up")
    return bare


def read(node: Namespace) -> Devices:
    with node.entered():
        return by_name(links.read())


def by_name(devices: tuple[Device, ...]) -> Devices:
    return {device.name: device for device in devices}


def addresses(device: Device) -> list[str]:
    return [format_address(address) for address in device.addresses]


def networks(device: Device) -> list[str]:
    return sorted(map(format_network, device.networks))


def leading(devices: Devices) -> set[str]:
    return {name for name, device in devices.items() if device.default_route}


def test_in_a_new_namespace_loopback_is_down(bare: Namespace) -> None:
    """Other devices such as tunl0 may follow: with these modules, the kernel adds them to each namespace."""
    with bare.entered():
        loopback = Device(ifindex=1, name="lo", kind="", link_type=LOOPBACK, up=False, mac=bytes(6))
        assert links.read()[0] == loopback


def test_devices_are_sorted_by_ifindex(node: Namespace) -> None:
    node.ip("link add late index 900 type bridge", "link add early index 500 type bridge")
    with node.entered():
        found = [device.ifindex for device in links.read()]
    assert found == sorted(found)
    assert found[-2:] == [500, 900]


def test_bridge_ports_have_their_bridge_as_master(node: Namespace) -> None:
    node.ip("link add br0 type bridge", "link set n1 master br0", "link set n1 down")
    found = read(node)
    assert (found["n1"].master, found["n1"].master_kind) == (found["br0"].ifindex, "bridge")
    assert (found["n1"].kind, found["n1"].up) == ("veth", False)
    assert (found["n0"].master, found["n0"].master_kind) == (0, "")
    assert (found["br0"].kind, found["br0"].link_type) == ("bridge", ETHERNET)


KINDS = {
    "veth": ("link add made type veth peer name other", "veth", ETHERNET),
    "vxlan": ("link add made type vxlan id 7 dstport 4789 dev n0", "vxlan", ETHERNET),
    "macvlan": ("link add link n0 made type macvlan", "macvlan", ETHERNET),
    "tap": ("tuntap add made mode tap", "tun", ETHERNET),
    "tun": ("tuntap add made mode tun", "tun", RAW_IP),
    "geneve": ("link add made type geneve id 7 remote 10.0.0.2", "geneve", ETHERNET),
    "ipip": ("link add made type ipip local 10.0.0.1 remote 10.0.0.2", "ipip", TUNNEL),
    "wireguard": ("link add made type wireguard", "wireguard", RAW_IP),
    "dummy": ("link add made type dummy", "dummy", ETHERNET),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_device_has_its_kind_and_link_type(node: Namespace, kind: str) -> None:
    command, reported, link_type = KINDS[kind]
    if node.lacks(command):
        pytest.skip(f"this kernel has no {kind}")
    made = read(node)["made"]
    assert (made.kind, made.link_type, made.up) == (reported, link_type, False)


def test_global_addresses_are_in_kernel_order_with_secondary_ones_last(node: Namespace) -> None:
    """10.0.0.2 is a secondary address, because it is in the network of 10.0.0.1."""
    node.ip(
        "addr add 10.0.0.1/24 dev n0",
        "addr add 10.0.0.2/24 dev n0",
        "addr add 10.9.0.1/16 dev n0",
        "addr add 169.254.7.7/16 dev n0 scope link",
        "addr add fe80::7/64 dev n0 nodad",
        "addr add fd00:20::1/64 dev n0 nodad",
    )
    found = read(node)
    assert addresses(found["n0"]) == ["10.0.0.1", "10.9.0.1", "fd00:20::1", "10.0.0.2"]
    assert addresses(found["lo"]) == addresses(found["n1"]) == []
    assert networks(found["n0"]) == ["10.0.0.0/24", "10.9.0.0/16", "fd00:20::/64"]
    assert found["lo"].networks == found["n1"].networks == ()


def test_a_point_to_point_device_has_its_local_address(node: Namespace) -> None:
    node.ip("addr add 10.0.0.1 peer 10.0.0.9 dev n0", "addr add fd00:20::1 peer fd00:20::9 dev n0 nodad")
    assert addresses(read(node)["n0"]) == ["10.0.0.1", "fd00:20::1"]
    assert networks(read(node)["n0"]) == ["10.0.0.9/32", "fd00:20::9/128"]


def test_tentative_addresses_are_omitted_and_deprecated_ones_last(node: Namespace) -> None:
    """An address is no source address before it passes duplicate address detection (RFC 4862 5.4)."""
    node.ip("link set n1 down")  # without a carrier, detection does not start
    node.ip(
        "addr add fd00:20::7/64 dev n0",
        "addr add fd00:20::1/64 dev n0 nodad",
        "addr add fd00:20::2/64 dev n0 nodad preferred_lft 0",
    )
    assert addresses(read(node)["n0"]) == ["fd00:20::1", "fd00:20::2"]


def test_a_default_route_of_either_family_marks_its_device(node: Namespace) -> None:
    node.ip("addr add 10.0.0.1/24 dev n0", "route add default via 10.0.0.254")
    node.ip("addr add fd00:20::1/64 dev n1 nodad", "route add default via fd00:20::fe")
    assert leading(read(node)) == {"n0", "n1"}


def test_a_multipath_default_route_marks_all_its_devices(node: Namespace) -> None:
    node.ip("addr add 10.0.0.1/24 dev n0", "addr add 10.0.1.1/24 dev n1")
    node.ip("route add default nexthop via 10.0.0.254 nexthop via 10.0.1.254")
    assert leading(read(node)) == {"n0", "n1"}
    node.ip("route del default")
    assert leading(read(node)) == set()
    node.ip("addr add fd00:20::1/64 dev n0 nodad", "addr add fd00:21::1/64 dev n1 nodad")
    node.ip("route add default nexthop via fd00:20::fe dev n0 nexthop via fd00:21::fe dev n1")
    assert leading(read(node)) == {"n0", "n1"}


def test_a_default_route_with_a_nexthop_object_marks_its_device(node: Namespace) -> None:
    node.ip("addr add 10.0.0.1/24 dev n0", "nexthop add id 7 via 10.0.0.254 dev n0")
    node.ip("route add default nhid 7")
    assert leading(read(node)) == {"n0"}


def test_other_tables_unreachable_and_other_routes_mark_no_device(
    node: Namespace,
) -> None:
    node.ip(
        "addr add 10.0.0.1/24 dev n0",
        "route add default via 10.0.0.254 table 1000",
        "route add 0.0.0.0/1 via 10.0.0.254",
        "route add unreachable default metric 4278198272",
    )
    assert leading(read(node)) == set()


def test_a_thousand_devices_are_all_read(node: Namespace) -> None:
    """Devices and addresses need more than one datagram of a dump."""
    before = read(node)
    node.ip(*(f"link add v{number} type veth peer name w{number}" for number in range(500)))
    node.ip(*(f"addr add 10.1.{number // 250}.{number % 250}/32 dev v{number}" for number in range(500)))
    found = read(node)
    assert len(found) == len(before) + 1000
    assert addresses(found["v499"]) == ["10.1.1.249"]


class Watch:
    """`watch` in a thread; `next` returns the next report."""

    def __init__(self, node: Namespace) -> None:
        self.reports: queue.Queue[Devices] = queue.Queue()
        self._stop = threading.Event()
        self._node = node
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._node.entered():
            links.watch(lambda devices: self.reports.put(by_name(devices)), self._stop)

    def next(self) -> Devices:
        return self.reports.get(timeout=60)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)
        assert not self._thread.is_alive()


def test_the_first_report_is_immediate_and_later_ones_follow_changes(node: Namespace) -> None:
    with Watch(node) as watch:
        assert watch.next() == read(node)
        node.ip("tuntap add tap0 mode tap")
        assert "tap0" in watch.next()
        node.ip("addr add 10.0.0.1/24 dev n0")
        assert addresses(watch.next()["n0"]) == ["10.0.0.1"]
        node.ip("route add default via 10.0.0.254")
        assert leading(watch.next()) == {"n0"}
        node.ip("route del default")
        assert leading(watch.next()) == set()
        node.ip("tuntap del tap0 mode tap")
        assert "tap0" not in watch.next()


def test_a_recreated_device_is_reported_with_its_new_index(node: Namespace) -> None:
    with Watch(node) as watch:
        before = watch.next()["n0"]
        node.ip("link del n0", "link add n0 type veth peer name n1")
        while (now := watch.next().get("n0", before)) == before:
            pass
        assert now.ifindex != before.ifindex


def test_changes_of_other_routes_trigger_no_read(node: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router may add and delete thousands of routes."""
    reads = threading.Semaphore(0)
    real = links.read

    def counted() -> tuple[Device, ...]:
        result = real()
        reads.release()
        return result

    monkeypatch.setattr(links, "read", counted)
    node.ip("addr add 10.0.0.1/24 dev n0")
    with Watch(node) as watch:
        watch.next()
        while reads.acquire(timeout=1):  # also after the kernel has noticed carriers, which is asynchronous
            pass
        node.ip(*(f"route add 10.7.{number}.0/24 via 10.0.0.254" for number in range(100)))
        node.ip("route add default via 10.0.0.254 table 1000")
        assert not reads.acquire(timeout=5 * rtnetlink_watch.COALESCE_SECONDS)
        node.ip("link set n0 mtu 1400")
        assert reads.acquire(timeout=60)
    assert watch.reports.empty()
