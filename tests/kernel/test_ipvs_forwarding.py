"""Direct routing and tunnels of mode ipvs: packets of all clients, limits, restarts, and what is left.

Needs a kernel with IPVS: tests/vm.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ipvs.backend import LIMITED
from ebpfproxy.lab import Lab, PodNetwork
from ebpfproxy.linux import sysctl
from ebpfproxy.model.address import Protocol
from tests.kernel.ipvs_forwarding_testbed import (
    DIRECT,
    FAMILIES,
    HONORED,
    TCP,
    TUNNEL,
    UDP,
    Forwarded,
    connections,
    devices,
    forwarded,
    listed,
    load,
    methods,
    received,
    send_tunneled,
    settings,
    settled,
    vips,
)
from tests.kernel.ipvs_here import lacks_ipvs

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(1800)]

LAST_ACK = 150.0
"""Seconds after which a socket has ended whose last packet got lost: with 8 retries, about 100 s."""

ROUTED, TUNNELED, PORT_DIFFERS, BEHIND_GATEWAY, BOTH = 10, 11, 12, 13, 14


@pytest.fixture(scope="module")
def nodes() -> Iterator[Forwarded]:
    """Both nodes with running agents, and these Services."""
    if reason := lacks_ipvs():
        pytest.skip(reason)
    with Lab("test-forward", 77, PodNetwork.ROUTED) as lab:
        made = Forwarded(lab)
        before = {pod.name: settings(pod) for pod in (made.node, made.second.host, made.a, made.d)}
        made.before = before
        made.serve(ROUTED, DIRECT, made.a, made.b)
        made.serve(TUNNELED, TUNNEL, made.a, made.d)
        made.serve(PORT_DIFFERS, TUNNEL, made.a, ports=[TCP], target=8081)
        made.serve(BEHIND_GATEWAY, DIRECT, made.a, made.d)
        try:
            made.start()
            made.start(node=made.second)
            yield made
        finally:
            made.end()


def test_ipvsadm_shows_route_and_tunnel(nodes: Forwarded) -> None:
    for family in FAMILIES:
        assert methods(nodes.node, ROUTED, family) == {"Route"}
        assert methods(nodes.node, TUNNELED, family) == {"Tunnel"}
    assert "10.96.0.11:8080" in listed(nodes.node)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", [TCP, UDP])
@pytest.mark.parametrize(("number", "servers"), [(ROUTED, "ab"), (TUNNELED, "ad")])
@pytest.mark.parametrize("client", "xp")
def test_servers_see_the_client(
    nodes: Forwarded, client: str, number: int, servers: str, protocol: Protocol, family: str
) -> None:
    """With policy Cluster a translated connection of an outside client is masqueraded. This one is not, so
    the endpoint has replied to the client itself.
    """
    pod = getattr(nodes, client)
    address = getattr(pod, family)
    assert nodes.answers(pod, protocol, number, family) == {(name, address) for name in servers}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_direct_routing_serves_the_node(nodes: Forwarded, protocol: Protocol, family: str) -> None:
    assert {name for name, _ in nodes.answers(nodes.node, protocol, ROUTED, family)} == {"a", "b"}


@pytest.mark.parametrize(
    ("number", "why"), [(PORT_DIFFERS, "another port"), (BEHIND_GATEWAY, "behind a gateway")]
)
def test_a_service_beyond_the_limits_is_translated_and_reported_once(
    nodes: Forwarded, number: int, why: str
) -> None:
    assert methods(nodes.node, number, "v4") == {"Masq"}
    lines = [
        line.text for line in nodes.agents[0].lines if LIMITED in line.text and f"web-{number}" in line.text
    ]
    assert len(lines) == 1
    assert why in lines[0]


def test_a_translated_service_still_works(nodes: Forwarded) -> None:
    assert {name for name, _ in nodes.answers(nodes.x, TCP, BEHIND_GATEWAY, "v4")} == {"a", "d"}


def test_a_change_of_routes_changes_the_method(nodes: Forwarded) -> None:
    (route,) = json.loads(nodes.node.run(["ip", "-j", "route", "get", nodes.d.v4]).stdout)
    assert "gateway" in route
    direct = [f"{nodes.d.v4}/32", "dev", route["dev"]]
    nodes.node.run(["ip", "route", "add", *direct])
    try:
        settled(lambda: methods(nodes.node, BEHIND_GATEWAY, "v4"), {"Route"}, "it is routed directly")
    finally:
        nodes.node.run(["ip", "route", "del", *direct])
    settled(lambda: methods(nodes.node, BEHIND_GATEWAY, "v4"), {"Masq"}, "it is translated again")


def test_endpoints_have_the_addresses(nodes: Forwarded) -> None:
    found = devices(nodes.d)
    tunnels = [name for name in found if name.startswith("ebpt")]
    assert len(tunnels) == 2
    addresses = {each for name, of in found.items() if name.startswith("ebpv") for each in of}
    assert addresses == {*vips(TUNNELED), *vips(BEHIND_GATEWAY)}
    assert devices(nodes.e) == {}


def test_verify_finds_no_difference_and_an_injected_one_is_restored(nodes: Forwarded) -> None:
    command = [
        sys.executable,
        "-m",
        "ebpfproxy",
        "verify",
        "--proxy-mode=ipvs",
        HONORED,
        "--detect-local-mode=InterfaceNamePrefix",
        "--pod-interface-name-prefix=veth",
        f"--manifests={nodes.folder}",
        f"--hostname-override={nodes.first.name}",
    ]
    nodes.agents[0].process.send_signal(signal.SIGSTOP)  # so that it restores nothing meanwhile
    try:
        clean = nodes.node.run(command, check=False, timeout=300)
        name = next(name for name in devices(nodes.a) if name.startswith("ebpv4"))
        nodes.a.run(["ip", "addr", "del", f"{vips(ROUTED)[0]}/32", "dev", name])
        nodes.a.run(
            ["ip", "link", "del", next(name for name in devices(nodes.a) if name.startswith("ebpt4"))]
        )
        nodes.node.run(["sysctl", "-w", "net.ipv4.conf.all.accept_local=0"])
        found = nodes.node.run(command, check=False, timeout=300).stdout
    finally:
        nodes.agents[0].process.send_signal(signal.SIGCONT)
    assert clean.returncode == 0, clean.stdout + clean.stderr + nodes.agents[0].log()[-4000:]
    for text in (
        f"address {vips(ROUTED)[0]} at endpoint {nodes.a.v4}",
        f"tunnel device at endpoint {nodes.a.v4}",
        "accept_local",
    ):
        assert text in found
    settled(lambda: vips(ROUTED)[0] in str(devices(nodes.a)), True, "the address is restored")
    settled(lambda: "ebpt4" in str(devices(nodes.a)), True, "the tunnel is restored")
    settled(lambda: settings(nodes.node)["all/accept_local"], "1", "the sysctl is restored")


@pytest.mark.parametrize("number", [ROUTED, TUNNELED])
def test_no_connection_fails_over_a_crash_and_restart(nodes: Forwarded, number: int) -> None:
    targets = [(protocol, vip) for protocol in (TCP, UDP) for vip in vips(number)]
    with load(nodes.x, *targets):
        nodes.agents[0].kill()
        nodes.agents[0] = nodes.start()
        nodes.agents.pop()


def test_weights_and_schedulers_are_those_of_the_service(nodes: Forwarded) -> None:
    wanted = {"ebpfproxy/endpoint-weights": f"{nodes.a.v4}=3", "ebpfproxy/lb-algorithm": "least-connections"}
    nodes.serve(BOTH, DIRECT, nodes.a, nodes.b, annotations=wanted)
    try:
        settled(lambda: methods(nodes.node, BOTH, "v4"), {"Route"}, "the Service is served")
        lines = listed(nodes.node).splitlines()
        at = lines.index(f"TCP  {vips(BOTH)[0]}:8080 wlc")
        weights = {line.split()[1]: line.split()[3] for line in lines[at + 1 : at + 3]}
        assert weights == {f"{nodes.a.v4}:8080": "3", f"{nodes.b.v4}:8080": "1"}
    finally:
        nodes.remove(BOTH)


def test_a_removed_service_leaves_nothing_at_its_endpoints(nodes: Forwarded) -> None:
    nodes.serve(BOTH, TUNNEL, nodes.e)
    settled(lambda: len(devices(nodes.e)), 4, "the endpoint has devices")
    nodes.remove(BOTH)
    settled(lambda: devices(nodes.e), {}, "the endpoint has no devices")


def test_an_open_connection_keeps_the_address_until_it_ends(nodes: Forwarded) -> None:
    nodes.serve(BOTH, TUNNEL, nodes.e, ports=[TCP])
    settled(lambda: len(devices(nodes.e)), 4, "the endpoint has devices")
    settled(lambda: methods(nodes.node, BOTH, "v4"), {"Tunnel"}, "the Service is served")
    with load(nodes.x, (TCP, vips(BOTH)[0])):
        nodes.serve(BOTH, TUNNEL, nodes.e, nodes.d, ports=[TCP])
        settled(lambda: vips(BOTH)[0] in str(devices(nodes.d)), True, "the other endpoint has the address")
        nodes.serve(BOTH, TUNNEL, nodes.d, ports=[TCP])
        settled(lambda: vips(BOTH)[1] in str(devices(nodes.e)), False, "the unused address is removed")
        assert vips(BOTH)[0] in str(devices(nodes.e))
    try:
        settled(lambda: devices(nodes.e), {}, "the endpoint has no devices", patience=LAST_ACK)
    except AssertionError as failure:
        failure.add_note(connections(nodes.e))
        failure.add_note(nodes.agents[1].log()[-4000:])
        raise
    finally:
        nodes.remove(BOTH)


def test_an_endpoint_forwards_nothing_for_an_address_that_it_does_not_have_yet(nodes: Forwarded) -> None:
    """Its node would select another endpoint, and the connection would end once this one has the address."""
    was = nodes.e.call(lambda: sysctl.read("net/ipv4/ip_forward"))
    nodes.e.call(lambda: sysctl.ensure("net/ipv4/ip_forward", "1"))
    try:
        nodes.serve(BOTH, TUNNEL, nodes.e)
        settled(lambda: len(devices(nodes.e)), 4, "the endpoint has devices")
        (tunnel,) = (name for name in devices(nodes.e) if name.startswith("ebpt4-"))
        before = forwarded(nodes.e)
        nodes.node.call(lambda: send_tunneled(nodes.x.v4, "203.0.113.99", nodes.e.v4, 10))
        settled(lambda: received(nodes.e, tunnel) >= 10, True, "the packets have arrived")
        assert forwarded(nodes.e) == before
    finally:
        nodes.remove(BOTH)
        nodes.e.call(lambda: sysctl.ensure("net/ipv4/ip_forward", was))


def test_cleanup_leaves_nothing_and_restores_sysctls(nodes: Forwarded) -> None:
    nodes.end()
    for node in (nodes.first, nodes.second):
        command = [
            sys.executable,
            "-m",
            "ebpfproxy",
            "cleanup",
            f"--bpffs-root={node.bpffs}",
            f"--cgroup-root={node.cgroup}",
        ]
        done: subprocess.CompletedProcess[str] = node.host.run(command, timeout=600)
        assert "network namespaces of endpoints" in done.stdout + done.stderr
    for pod in (nodes.a, nodes.b, nodes.d, nodes.e):
        assert devices(pod) == {}
    assert "->" not in listed(nodes.node).split("ActiveConn InActConn")[1]
    for pod in (nodes.node, nodes.second.host, nodes.a, nodes.d):
        assert settings(pod) == nodes.before[pod.name]
