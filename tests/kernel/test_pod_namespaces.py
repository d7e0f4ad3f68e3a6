"""Whose sockets are connected to endpoints: those of pods, and only if the pod's packets all take one way.

The sockets of guests, of clusters within pods, and of pods with routes or rules of their own connect to the
frontend. Their endpoints may be unreachable for them, or they have another Service at the same address.
"""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.diagnose.doctor.socket_path import FEATURE
from ebpfproxy.lab import Lab, Netns, Pod, manifests
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netns import netns
from tests.kernel import attached
from tests.kernel.clients import (
    TCP,
    UDP,
    Dial,
    ask_from,
    connected,
    converse,
    family_of,
    outcome,
    outcomes,
    socket_in,
)
from tests.kernel.cluster import SERVICE_NETWORKS, TCP_TARGET, Cluster, Exposed, eventually
from tests.kernel.test_explain import explain
from tests.kernel.test_socket_lb import actual_peer, as_in_proc

pytestmark = pytest.mark.kernel

FLAGS = ("--sync-period=1s", "--socket-lb-annotations")
OFF = {"annotations": {"ebpfproxy/socket-lb": "off"}}
OWN_PORT = 9999
"""Where a pod serves what its own rules translate the Service's address to."""


@pytest.fixture(scope="module")
def place() -> Iterator[Cluster]:
    """Each test has pods of its own."""
    with Lab("test-namespaces", 84) as lab, Cluster(lab) as cluster:
        cluster.start(*FLAGS)
        yield cluster


@pytest.fixture(scope="module")
def web(place: Cluster) -> Exposed:
    return place.service().to(place.a)


@pytest.fixture
def pod(place: Cluster) -> Iterator[Pod]:
    """A pod that was just created."""
    made = place.lab.pod("made")
    try:
        yield made
    finally:
        place.lab.remove_pod(made)


def cookie(of: Pod) -> int:
    return of.call(netns.cookie)


def on_socket_path(place: Cluster, pod: Pod) -> bool:
    """Whether the programs connect the pod's sockets to endpoints."""
    maps = Maps(Pins(place.lab.bpffs).hooked_in() / "maps")
    try:
        return maps["pod_namespaces"].lookup(cookie(pod).to_bytes(8, "little")) is not None
    finally:
        maps.close()


def await_socket_path(place: Cluster, pod: Pod) -> None:
    eventually(lambda: on_socket_path(place, pod), "the pod is on the socket path")


def has_programs(place: Cluster, pod: Pod) -> bool:
    def look() -> bool:
        return attached.program_id(socket.if_nametoindex(pod.device), Side.INGRESS) is not None

    return place.node.call(look)


def restart(place: Cluster) -> None:
    """All classes are known at the first sync."""
    place.end()
    place.start(*FLAGS)


def dnat(web: Exposed, to: str) -> str:
    """Rules of a namespace of its own for the address of the Service."""
    rule = f"ip daddr {web.v4} tcp dport 80 dnat to {to}:{OWN_PORT}"
    return (
        f"table ip own {{ chain out {{ type nat hook output priority -100; {rule}\n }}\n"
        f"chain pre {{ type nat hook prerouting priority -100; {rule}\n }}\n}}\n"
    )


def load(into: Netns, rules: str) -> None:
    into.run(["nft", "-f", "-"], stdin=rules)


def test_connections_stay_on_the_packet_path_when_a_pod_gets_known_and_none_fails(
    place: Cluster, web: Exposed, pod: Pod
) -> None:
    stay_on_packet_path(place, pod)
    assert actual_peer(pod, "v4", web.v4, 80) == as_in_proc("v4", web.v4, 80)
    early = [connected(pod, TCP, web.v4, 80), connected(pod, UDP, web.v4, 53)]
    assert [converse(each) for each in early] == ["a", "a"]
    place.lab.ip(pod, "link del extra")
    while not on_socket_path(place, pod):
        assert (outcome(pod, TCP, web.v4, 80), outcome(pod, UDP, web.v4, 53)) == ("a", "a")
        await_known(place, pod)
    assert actual_peer(pod, "v4", web.v4, 80) == as_in_proc("v4", place.a.v4, TCP_TARGET)
    await_known(place, pod)
    assert has_programs(place, pod)
    assert [converse(each) for each in early] == ["a", "a"]
    for each in early:
        each.close()


def stay_on_packet_path(place: Cluster, pod: Pod) -> None:
    """A second device keeps the pod there, as each pod is in its first second."""
    place.lab.ip(pod, "link add extra type veth peer name extra2", "link set extra up")
    await_known(place, pod)


def sticky(place: Cluster) -> list[Exposed]:
    """Services with session affinity."""
    return [place.service(sessionAffinity="ClientIP").to(place.a, place.b, place.c) for _ in range(6)]


def choices(pod: Pod, services: list[Exposed], versions: tuple[int, ...] = (4, 6)) -> list[str]:
    """The endpoint of each Service that the pod's socket gets: TCP, and an unconnected UDP socket."""
    return [
        each
        for web in services
        for address in (web.address(f"v{version}") for version in versions)
        for each in (outcome(pod, TCP, address, 80), datagram(pod, address))
    ]


def datagram(pod: Pod, address: str) -> str:
    with socket_in(pod, UDP, family_of(address)) as client:
        return ask_from(client, address, 53)[0]


def test_a_pod_that_gets_known_keeps_its_endpoints_by_affinity(place: Cluster, pod: Pod) -> None:
    """By chance, a client keeps all 24 endpoints once in 10^11 runs."""
    services = sticky(place)
    stay_on_packet_path(place, pod)
    chosen = choices(pod, services)
    assert set(chosen) == {"a", "b", "c"}
    place.lab.ip(pod, "link del extra")
    await_socket_path(place, pod)
    for _ in range(5):
        assert choices(pod, services) == chosen
    place.lab.ip(pod, "link add extra type veth peer name extra2", "link set extra up")
    eventually(lambda: not on_socket_path(place, pod), "the pod is on the packet path")
    assert choices(pod, services) == chosen


def test_a_pod_that_gets_known_keeps_its_endpoints_by_source_hash(place: Cluster, pod: Pod) -> None:
    """Services with other endpoints have other tables."""
    a, b, c = place.a, place.b, place.c
    services = []
    for pods in (a, b, c), (a, b), (b, c), (a, c):
        web = place.service()
        web.annotations["ebpfproxy/lb-algorithm"] = "source-hash"
        services.append(web.to(*pods))
    stay_on_packet_path(place, pod)
    chosen = choices(pod, services)
    assert len(set(chosen)) > 1
    place.lab.ip(pod, "link del extra")
    await_socket_path(place, pod)
    assert choices(pod, services) == chosen


def test_a_pod_with_several_addresses_is_one_client_until_one_is_left(place: Cluster, pod: Pod) -> None:
    services = sticky(place)
    stay_on_packet_path(place, pod)
    chosen = choices(pod, services, (4,))
    second = pod.v4.rpartition(".")[0] + ".250"
    place.lab.ip(pod, f"addr add {second}/32 dev eth0", "link del extra")
    await_socket_path(place, pod)
    assert len(set(choices(pod, services[:1] * 5, (4,))[::2])) == 1
    assert clients_of(place, services[0]) == {pod.v4, f"netns {cookie(pod)}"}
    place.lab.ip(pod, f"addr del {second}/32 dev eth0")
    await_known(place, pod)
    assert choices(pod, services, (4,)) == chosen


def clients_of(place: Cluster, web: Exposed) -> set[str]:
    """The clients that have an endpoint of the Service's TCP port by affinity."""
    rows = json.loads(place.ebpfproxy("dump", "affinity", "-o", "json").stdout)
    return {each["client"] for each in rows if each["service"] == f"default/{web.name}:tcp"}


def test_an_ipv6_socket_is_the_same_client_at_an_ipv4_frontend(place: Cluster, pod: Pod) -> None:
    """It is bound to all addresses, or to the mapped one."""
    services = sticky(place)
    await_socket_path(place, pod)
    for web in services:
        chosen = outcome(pod, TCP, web.v4, 80)
        for source in "::", f"::ffff:{pod.v4}":
            assert outcomes(pod, [Dial(TCP, f"::ffff:{web.v4}", 80, source=(source, 0))]) == [chosen]
    assert clients_of(place, services[0]) == {pod.v4}


def test_a_device_loses_its_programs_once_the_pod_has_no_connection_of_the_packet_path(
    place: Cluster, web: Exposed, pod: Pod
) -> None:
    await_socket_path(place, pod)
    eventually(lambda: not has_programs(place, pod), "the device has no programs")
    assert outcome(pod, TCP, web.v4, 80) == "a"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_pod_with_rules_of_its_own_for_the_same_address_reaches_what_they_say(
    place: Cluster, web: Exposed, pod: Pod, restarted: bool
) -> None:
    """A cluster in a pod usually has the same Service range."""
    load(pod, dnat(web, pod.v4))
    pod.serve(TCP, OWN_PORT, "nested")
    if restarted:
        await_known(place, pod)
        restart(place)
    assert outcome(pod, TCP, web.v4, 80) == "nested"
    await_known(place, pod)
    assert outcome(pod, TCP, web.v4, 80) == "nested"


def await_known(place: Cluster, pod: Pod) -> None:
    """Wait until the agent has classified a pod that is created later than this one."""
    later = place.lab.pod("later")
    try:
        await_socket_path(place, later)
    finally:
        place.lab.remove_pod(later)


def test_a_pod_of_a_cluster_in_a_pod_reaches_that_cluster(place: Cluster, web: Exposed, pod: Pod) -> None:
    load(pod, dnat(web, pod.v4))
    pod.serve(TCP, OWN_PORT, "nested")
    inner = place.lab._testbed.create_netns("inner", pod.cgroup, Pair("10.88.0.2", "fd00:88::2"), "toinner")
    inner_pod = inner.popen(["sleep", "infinity"])
    place.lab.ip(
        pod,
        f"link add toinner type veth peer name eth0 netns {inner.namespace}",
        "addr add 10.88.0.1/24 dev toinner",
        "link set toinner up",
    )
    place.lab.ip(
        inner,
        "link set lo up",
        f"addr add {inner.v4}/24 dev eth0",
        "link set eth0 up",
        "route add default via 10.88.0.1",
    )
    try:
        await_known(place, pod)
        assert outcome(inner, TCP, web.v4, 80) == "nested"
    finally:
        inner_pod.kill()
        inner.reap()
        netns.delete(inner.namespace)


KILL_SWITCH = f"""
table ip switch {{
  chain out {{
    type filter hook output priority 0; policy drop;
    ip daddr {SERVICE_NETWORKS[0]} accept
  }}
}}
"""


@pytest.mark.parametrize("kind", ["route", "rule"])
def test_a_pod_that_may_only_send_to_services_reaches_them(
    place: Cluster, web: Exposed, pod: Pod, kind: str
) -> None:
    gateway = place.lab.addresses.gateway(0)
    if kind == "route":
        place.lab.ip(pod, "route del default", f"route add {SERVICE_NETWORKS[0]} via {gateway.v4}")
    else:
        load(pod, KILL_SWITCH)
    assert outcome(pod, TCP, web.v4, 80) == "a"
    await_known(place, pod)
    assert (outcome(pod, TCP, web.v4, 80), outcome(pod, UDP, web.v4, 53)) == ("a", "a")
    restart(place)
    assert (outcome(pod, TCP, web.v4, 80), outcome(pod, UDP, web.v4, 53)) == ("a", "a")


def test_a_pod_whose_second_device_leads_to_the_pod_network_reaches_services(
    place: Cluster, web: Exposed, pod: Pod
) -> None:
    """As Multus adds it. Nothing behind the second device forwards to pods."""
    outside = place.lab.outside
    place.lab.ip(
        pod,
        f"link add net1 type veth peer name multus netns {outside.namespace}",
        "addr add 10.66.0.2/24 dev net1",
        "link set net1 up",
    )
    place.lab.ip(outside, "addr add 10.66.0.1/24 dev multus", "link set multus up")
    place.lab.ip(pod, f"route add {place.a.v4}/32 via 10.66.0.1")
    place.lab.ip(outside, f"route add blackhole {place.a.v4}/32")
    try:
        assert outcome(pod, TCP, web.v4, 80) == "a"
        await_known(place, pod)
        assert outcome(pod, TCP, web.v4, 80) == "a"
    finally:
        place.lab.ip(outside, f"route del blackhole {place.a.v4}/32", "link del multus")


def test_a_pod_with_very_many_routes_stays_on_the_packet_path_and_others_get_known(
    place: Cluster, web: Exposed, pod: Pod
) -> None:
    """A container with CAP_NET_ADMIN could fill the agent's memory with what it reads."""
    routes = (f"route add 10.70.{n // 250}.{n % 250}/32 dev lo" for n in range(1100))
    pod.run(["ip", "-batch", "-"], stdin="\n".join(routes) + "\n")
    await_known(place, pod)
    assert not on_socket_path(place, pod)
    assert outcome(pod, TCP, web.v4, 80) == "a"


@pytest.mark.long
def test_a_pod_that_gets_rules_of_its_own_later_returns_to_the_packet_path(
    place: Cluster, web: Exposed, pod: Pod
) -> None:
    pod.serve(TCP, OWN_PORT, "nested")
    await_socket_path(place, pod)
    assert outcome(pod, TCP, web.v4, 80) == "a"
    load(pod, dnat(web, pod.v4))
    eventually(lambda: not on_socket_path(place, pod), "the pod is on the packet path")
    assert outcome(pod, TCP, web.v4, 80) == "nested"


def test_an_annotation_of_a_pod_selects_the_packet_path_live(place: Cluster, web: Exposed, pod: Pod) -> None:
    await_socket_path(place, pod)
    made = manifests.pod("made", place.lab.node_name, [pod.v4, pod.v6], [])
    made["metadata"] |= OFF
    place.write("made", made)
    assert actual_peer(pod, "v4", web.v4, 80) == as_in_proc("v4", web.v4, 80)
    with connected(pod, TCP, web.v4, 80) as sock:
        assert converse(sock) == "a"
        place.write("made")
        assert actual_peer(pod, "v4", web.v4, 80) == as_in_proc("v4", place.a.v4, TCP_TARGET)
        assert converse(sock) == "a"


def test_an_annotation_of_a_namespace_selects_the_packet_path_of_its_pods_live(
    place: Cluster, web: Exposed, pod: Pod
) -> None:
    """Pods are recognized by the UID in their cgroup, before the API has their addresses."""
    await_socket_path(place, pod)
    made = manifests.pod("made", place.lab.node_name, [], [])
    made["metadata"]["uid"] = pod.cgroup.parent.name.removeprefix("pod")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"} | OFF}
    place.write("made", made, namespace)
    try:
        assert actual_peer(pod, "v4", web.v4, 80) == as_in_proc("v4", web.v4, 80)
        made["metadata"]["annotations"] = {"ebpfproxy/socket-lb": "on"}
        place.write("made", made, namespace)
        assert actual_peer(pod, "v4", web.v4, 80) == as_in_proc("v4", place.a.v4, TCP_TARGET)
    finally:
        place.write("made")


def test_dump_and_doctor_show_the_path_of_each_namespace_and_the_reason(
    place: Cluster, web: Exposed, pod: Pod
) -> None:
    await_socket_path(place, pod)
    assert shown(place, pod)["path"] == "socket"
    place.lab.ip(pod, "link add second type veth peer name third", "link set second up", "link set third up")
    eventually(lambda: not on_socket_path(place, pod), "the pod is on the packet path")
    row = shown(place, pod)
    assert (row["path"], row["pod"]) == ("packet", pod.cgroup.parent.name.removeprefix("pod"))
    assert row["reason"] == f"cgroup of pod {row['pod']}; 3 devices are up, not 1"
    assert row["addresses"] == [pod.v4, pod.v6]
    report = place.ebpfproxy("doctor", "-o", "json", "--proxy-mode=ebpf", check=False)
    (check,) = (each for each in json.loads(report.stdout)["checks"] if each["feature"] == FEATURE)
    assert "1 not: 3 devices are up, not 1" in check["detail"]


def shown(place: Cluster, pod: Pod) -> dict[str, Any]:
    """The row of the pod's namespace in `dump namespaces`."""
    rows = json.loads(place.ebpfproxy("dump", "namespaces", "-o", "json").stdout)
    (row,) = (each for each in rows if each["cookie"] == cookie(pod))
    return dict(row)


@pytest.fixture
def guest() -> Iterator[tuple[Cluster, Pod]]:
    """A guest on a bridge with the uplink, as LXC and Incus set it up. Its router has routes to Services, by
    this node, but none to pods."""
    with Lab("test-guest", 85) as lab:
        node, outside = lab.node, lab.outside
        address = Pair(node.v4.rpartition(".")[0] + ".77", node.v6.rpartition(":")[0] + ":77")
        made = lab._testbed.create_netns("guest", lab.cgroup / "guests", address, "vethguest")
        lab.ip(
            node,
            "link add br0 type bridge",
            "link set br0 up",
            "link set eth0 master br0",
            f"addr del {node.v4}/24 dev eth0",
            f"addr add {node.v4}/24 dev br0",
            f"route replace default via {outside.v4} dev br0",
            f"link add vethguest type veth peer name eth0 netns {made.namespace}",
            "link set vethguest master br0 up",
        )
        lab.ip(
            made,
            "link set lo up",
            f"addr add {address.v4}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {outside.v4}",
        )
        with Cluster(lab) as cluster:
            pods = lab.addresses.pods(0)
            lab.ip(
                outside,
                f"route replace {SERVICE_NETWORKS[0]} via {node.v4}",
                f"route add blackhole {pods.v4}",
            )
            cluster.start("--sync-period=1s")
            yield cluster, made


def test_a_guest_on_a_bridge_with_the_uplink_reaches_services_by_its_router(
    guest: tuple[Cluster, Pod],
) -> None:
    cluster, client = guest
    web = cluster.service().to(cluster.a)
    assert outcome(client, TCP, web.v4, 80, 3.0) == "a"


def test_explain_names_the_class_of_the_clients_namespace_and_the_reason(
    place: Cluster, web: Exposed, pod: Pod
) -> None:
    assert "pod, socket path: cgroup of pod" in str(explain(place, f"{web.v4}:80", f"--from={place.p.netns}"))
    load(pod, KILL_SWITCH)
    text = str(explain(place, f"{web.v4}:80", f"--from={pod.netns}"))
    assert "pod, packet path: cgroup of pod" in text
    assert "tables of nftables" in text
    assert "ingress of vethmade" in text
