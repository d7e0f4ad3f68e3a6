"""Which network namespaces are those of a node's pods."""

from pathlib import Path

import pytest

from ebpfproxy.diagnose.explain import host
from ebpfproxy.linux.netlink import links, pod_devices
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import parse_address
from ebpfproxy.model.device import Device
from tests.support.namespace import Namespace, namespace
from tests.unit.diagnose.explain.scene import POD, situation

pytestmark = pytest.mark.kernel


def connect(node: Namespace, pod: Namespace) -> None:
    """Make `pod` a pod of `node`. Addresses and ifindexes are the same for each."""
    node.ip(
        f"link add veth0 index 7 type veth peer name eth0 index 9 netns {pod.name}",
        *("link set veth0 up", f"route add {POD}/32 dev veth0"),
    )
    pod.ip("link set eth0 up", f"address add {POD}/32 dev eth0")


def is_pod_of(pod: Namespace, node: Namespace) -> bool:
    with netns.path(node.name).open("rb") as there, pod.entered():
        return pod_devices.are_linked_to(there.fileno())


def pods_of(node: Namespace) -> list[Path]:
    with node.entered():
        found = host.pods_here(situation(devices=links.read(), routes=host.route_to))
        return [path for path, origin in found if parse_address(POD) in origin.addresses]


def test_equal_addresses_and_ifindexes_do_not_make_a_pod_of_another_node() -> None:
    with namespace("node") as node, namespace("twin") as twin, namespace("a") as a, namespace("b") as b:
        connect(node, a)
        connect(twin, b)
        assert [is_pod_of(a, node), is_pod_of(b, twin)] == [True, True]
        assert [is_pod_of(a, twin), is_pod_of(b, node)] == [False, False]
        assert [is_pod_of(node, node), is_pod_of(twin, node)] == [False, False]
        assert [pods_of(node), pods_of(twin)] == [[netns.path(a.name)], [netns.path(b.name)]]


def test_a_pod_without_a_pair_belongs_to_the_node_of_the_parent_device() -> None:
    with namespace("node") as node, namespace("twin") as twin, namespace("a") as a:
        node.ip("link add uplink type veth peer name peer")
        if node.lacks(f"link add macvlan0 link uplink netns {a.name} type macvlan"):
            pytest.skip("this kernel has no macvlan")
        assert (is_pod_of(a, node), is_pod_of(a, twin)) == (True, False)


def test_a_device_that_disappears_while_a_pod_is_read_has_no_counterpart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list of devices and the counterpart of each are separate reads."""
    with namespace("node") as node, namespace("a") as a:
        connect(node, a)
        a.ip("link add other type veth", "link set other up", "address add 192.0.2.1/32 dev other")
        read = links.read

        def read_then_delete() -> tuple[Device, ...]:
            found = read()
            a.ip("link delete other")
            return found

        with a.entered():
            assert pod_devices.by_address().keys() == {parse_address(POD), parse_address("192.0.2.1")}
            monkeypatch.setattr(links, "read", read_then_delete)
            assert pod_devices.by_address() == {parse_address(POD): pod_devices.PodDevice(9, 7)}
