"""To which devices the agent attaches its classifiers, depending on flags, pods and Services."""

import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.lab import Lab, Pod
from ebpfproxy.linux.bpf.tc import Side
from tests.kernel import attached
from tests.kernel.clients import TCP, connected, converse, outcome
from tests.kernel.cluster import Cluster, eventually

pytestmark = pytest.mark.kernel

BOTH, EGRESS = {Side.INGRESS, Side.EGRESS}, {Side.EGRESS}


def sides(cluster: Cluster, with_loopback: bool = False) -> dict[str, set[Side]]:
    """The devices of the node that have a classifier of the agent, and on which sides.

    `lo` can have one from any earlier test or start: the agent attaches it for good when packets of the node
    to a frontend take the packet path, such as those to a beacon before the hooks are attached.
    """

    def look() -> dict[str, set[Side]]:
        found = {
            name: {side for side in Side if attached.program_id(index, side) is not None}
            for index, name in socket.if_nameindex()
            if not name.startswith("ebpfproxy") and (with_loopback or name != "lo")
        }
        return {name: where for name, where in found.items() if where}

    return cluster.node.call(look)


def pods(cluster: Cluster) -> dict[str, set[Side]]:
    return {pod.device: BOTH for pod in cluster.lab.pods.values()}


@pytest.fixture
def newcomer(restartable: Cluster) -> Iterator[Pod]:
    """A pod that is created while the agent runs. Tests request this fixture late."""
    pod = restartable.lab.pod("newcomer")
    try:
        yield pod
    finally:
        restartable.lab.remove_pod(pod)


@pytest.fixture
def bypassing() -> Iterator[Cluster]:
    """A separate node: the agent remembers which pods were served as long as they exist."""
    with Lab("test-bypassing", 80) as lab, Cluster(lab) as cluster:
        yield cluster


def test_pod_devices_get_no_classifiers_until_a_service_needs_them(
    restartable: Cluster, request: pytest.FixtureRequest
) -> None:
    """This must be the first test with this node: after any other, classifiers stay on the pods' devices."""
    restartable.start()
    web = restartable.service(type="LoadBalancer", loadBalancerSourceRanges=["198.51.100.0/24"]).to(
        restartable.a
    )
    assert sides(restartable) == {"eth0": BOTH}, "no address is restricted"
    web.status = {"loadBalancer": {"ingress": [{"ip": "203.0.113.9"}]}}
    web.set()
    assert sides(restartable) == {"eth0": BOTH, **pods(restartable)}
    served = pods(restartable)
    web.set(loadBalancerSourceRanges=[])
    newcomer: Pod = request.getfixturevalue("newcomer")
    restartable.service().to(newcomer)
    eventually(
        lambda: sides(restartable) == {"eth0": BOTH, **served},
        "existing pods keep their classifiers, new pods lose them once they are known",
    )
    restartable.start()
    assert sides(restartable) == {"eth0": BOTH, **served}, "a restart keeps them"


@pytest.mark.parametrize("flags", [(), ("--ebpf-affinity-max=4096",)], ids=["same sizes", "other sizes"])
def test_a_pod_that_bypasses_the_socket_hooks_keeps_its_connection_over_a_restart(
    bypassing: Cluster, flags: tuple[str, ...]
) -> None:
    """Also before the collector thread looks for bypassing pods for the first time, which takes a second."""
    cluster, pod = bypassing, bypassing.lab.bypassing(bypassing.p)
    cluster.start()
    web = cluster.service().to(cluster.a)
    eventually(lambda: outcome(pod, TCP, web.v4, 80, 0.3) == "a", "the pod is served")
    with connected(pod, TCP, web.v4, 80) as sock:
        assert converse(sock) == "a"
        cluster.end()
        cluster.start(*flags)
        assert sides(cluster) == {"eth0": BOTH, cluster.p.device: BOTH}
        assert converse(sock) == "a"


def test_with_socket_lb_host_new_pod_devices_get_classifiers(
    restartable: Cluster, request: pytest.FixtureRequest
) -> None:
    restartable.start("--socket-lb=host")
    assert sides(restartable) == {"eth0": BOTH, **pods(restartable)}
    newcomer: Pod = request.getfixturevalue("newcomer")
    eventually(lambda: sides(restartable).get(newcomer.device) == BOTH, "the newcomer's device")


def test_with_socket_lb_off_the_loopback_device_gets_a_classifier(restartable: Cluster) -> None:
    restartable.start("--socket-lb=off")
    assert sides(restartable, with_loopback=True) == {"eth0": BOTH, "lo": EGRESS, **pods(restartable)}


def test_only_devices_matching_tc_devices_get_classifiers(restartable: Cluster) -> None:
    restartable.start("--socket-lb=host", "--tc-devices=vetha", "--tc-devices=veth[pq],nothing*")
    assert sides(restartable) == dict.fromkeys(("vetha", "vethp", "vethq"), BOTH)
