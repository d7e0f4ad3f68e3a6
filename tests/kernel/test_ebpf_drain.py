"""Drain of mode ebpf: existing connections keep working until they end, new ones go to the other backend."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import abi, cleanup
from ebpfproxy.backends.ebpf.drain import Drain
from ebpfproxy.backends.ebpf.flows.state import Flow, unit_now
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.errors import Rejected
from ebpfproxy.lab import Pod
from ebpfproxy.linux.bpf import cgroup, tc, tcx
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import links, reinjection
from ebpfproxy.model.address import Protocol, parse_address
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, connected, converse, outcome, ping, socket_in
from tests.kernel.cluster import TCP_TARGET, UDP_TARGET, eventually
from tests.kernel.test_socket_stale import leaves, reaches
from tests.kernel.two_nodes import Everywhere, TwoNodes, name_and_client

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
OFF, HOST = "--socket-lb=off", "--socket-lb=host"
LINKS = [f"link {hook.name}" for hook in reversed(SOCKET_HOOKS)]
GIVING_BACK = LINKS[6:]
PORTS = {TCP: (80, TCP_TARGET), UDP: (53, UDP_TARGET)}


@pytest.fixture
def pair(restartable_pair: TwoNodes) -> TwoNodes:
    """The first node may have state of the previous test, drained or not: a starting agent restores it."""
    return restartable_pair


def serve(pair: TwoNodes, *flags: str) -> Everywhere:
    """Start an agent; a Service with the endpoint a."""
    pair.restart(*flags)
    return pair.everywhere().to(pair.a)


def step(pair: TwoNodes) -> tuple[list[str], bool]:
    """One drain step in a new process, as after a restart: without any state of previous steps."""
    pair.end()
    return pair.node.call(lambda: Drain(pair.lab.bpffs, pair.lab.cgroup).step())


def await_end(pair: TwoNodes) -> None:
    """Drain until nothing is left, with timeouts of 0 for closed connections and UDP flows."""
    for path in pair.lab.bpffs.glob("programs-*/maps/node"):
        with contextlib.closing(Map.pinned(path)) as node:
            *first, _, _, _, _, rate, burst, _, _, _, _, _, _ = abi.NODE.unpack(node.lookup(bytes(4)) or b"")
            node.update(bytes(4), abi.NODE.pack(*first, 0, 0, 0, 0, rate, burst, *[0] * 6))
    eventually(lambda: not step(pair)[1], "everything is removed")


def remains(pair: TwoNodes) -> list[object]:
    """State of the eBPF backend on the first node: pins, programs, qdiscs, devices."""

    def on_devices() -> list[object]:
        names = links.names()
        clsacts = [f"clsact of {name}" for ifindex, name in names.items() if tc.has_clsact(ifindex)]
        return [
            *clsacts,
            *(name for name in names.values() if name in (reinjection.DEVICE, reinjection.PEER)),
        ]

    # The kernel itself may create maps.debug and similar names with a dot (bpf_preload).
    pins: list[object] = [path for path in pair.lab.bpffs.iterdir() if "." not in path.name]
    hooks = (cgroup.programs(pair.lab.cgroup, hook.attach_type) for hook in SOCKET_HOOKS)
    return pins + [ids for ids in hooks if ids] + pair.node.call(on_devices)


def answering_server(client: Pod, protocol: Protocol, address: str, port: int) -> str:
    """The name of the server that answers."""
    return name_and_client(outcome(client, protocol, address, port, 5.0))[0]


def server_of(sock: socket.socket) -> str:
    return name_and_client(converse(sock))[0]


@contextlib.contextmanager
def netfilter(
    pair: TwoNodes, web: Everywhere, pod: Pod, masquerade: str = "masquerade random"
) -> Iterator[None]:
    """Within the block, rules translate packets for the Service to a pod, as another backend would."""
    rules = []
    for family, ip in (("v4", "ip"), ("v6", "ip6")):
        for protocol, (port, target) in PORTS.items():
            to = getattr(pod, family)
            to = f"{to}:{target}" if family == "v4" else f"[{to}]:{target}"
            frontends = (web.address(family), port), (getattr(pair.node, family), web.node_port)
            for address, dport in frontends:
                name = protocol.name.lower()
                rules.append(f"{ip} daddr {address} {name} dport {dport} dnat {ip} to {to}")
    lines = "; ".join(rules)
    pair.node.run(
        ["nft", "-f", "-"],
        stdin=f"""table inet other {{
            chain incoming {{ type nat hook prerouting priority dstnat; {lines}; }}
            chain outgoing {{ type nat hook output priority -100; {lines}; }}
            chain last {{ type nat hook postrouting priority srcnat; ct status dnat {masquerade}; }}
            chain strict {{ type filter hook forward priority filter; ct state invalid drop; }}
        }}""",
    )
    try:
        yield
    finally:
        pair.node.run(["nft", "delete", "table", "inet", "other"])


# Connections of external clients


@pytest.mark.parametrize(("family", "node"), [("v4", "first"), ("v6", "second")])
def test_an_external_connection_works_until_its_end_and_new_ones_are_refused(
    pair: TwoNodes, family: str, node: str
) -> None:
    web = serve(pair).to(pair.a if node == "first" else pair.d)
    address = getattr(pair.node, family)
    name = answering_server(pair.x, TCP, address, web.node_port)
    with connected(pair.x, TCP, address, web.node_port) as sock:
        assert server_of(sock) == name
        removed, left = step(pair)
        assert (removed[:6], left) == (LINKS[:6], True)
        assert removed[6].endswith(" frontends")
        assert server_of(sock) == name
        assert outcome(pair.x, TCP, address, web.node_port) == REFUSED, "no process listens there"
        no_answer = REFUSED, SILENT  # the kernel limits the rate of ICMP errors
        assert outcome(pair.x, UDP, address, web.node_port, 0.3) in no_answer
        assert step(pair) == (GIVING_BACK, True)
        assert step(pair) == ([], True)
        assert server_of(sock) == name
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b"", "the FIN is forwarded"
    await_end(pair)
    assert remains(pair) == []
    assert step(pair) == ([], False)


@pytest.mark.same_for("family")
@both_families
def test_new_connections_go_to_the_other_backend_at_once(pair: TwoNodes, family: str) -> None:
    """Existing TCP connections, unknown to the other backend, keep their endpoint; UDP flows switch with the
    next datagram."""
    web = serve(pair).to(pair.d)
    dial = getattr(pair.node, family), web.node_port
    with connected(pair.x, TCP, *dial) as stream, connected(pair.x, UDP, *dial) as datagrams:
        assert (server_of(stream), server_of(datagrams)) == ("d", "d")
        with netfilter(pair, web, pair.b):
            assert answering_server(pair.x, TCP, *dial) == "d", "before the drain, eBPF serves it"
            step(pair)
            assert server_of(stream) == "d"
            assert server_of(datagrams) == "b"
            for client in (pair.x, pair.p, pair.node):
                for protocol in (TCP, UDP):
                    assert answering_server(client, protocol, *dial) == "b"
                    assert answering_server(client, protocol, web.address(family), PORTS[protocol][0]) == "b"
            step(pair)
            assert server_of(stream) == "d"
            stream.close()
            await_end(pair)
            assert remains(pair) == []
            assert server_of(datagrams) == "b"
            assert answering_server(pair.x, TCP, *dial) == "b"


def test_a_late_reply_to_an_external_client_is_translated(pair: TwoNodes) -> None:
    """For an endpoint on each node, so masqueraded and not: replies are translated without the Service."""
    web = serve(pair)
    for endpoint in (pair.p, pair.r):
        web.to(endpoint)
        with connected(pair.x, UDP, pair.node.v4, web.node_port) as client, bound(endpoint, "v4") as server:
            client.send(b"?")
            _, peer = server.recvfrom(16)
            step(pair)
            server.sendto(b"late", peer)
            assert client.recv(16) == b"late"
            step(pair)
            server.sendto(b"later", peer)
            assert client.recv(16) == b"later"
        pair.restart()


def bound(pod: Pod, family: str) -> socket.socket:
    """A socket of a pod that is bound to the UDP server's port."""
    made = socket_in(pod, UDP)
    made.bind((getattr(pod, family), UDP_TARGET))
    return made


def test_refusals_and_echo_replies_end_with_the_first_step(pair: TwoNodes) -> None:
    web = serve(pair)
    web.to()
    assert outcome(pair.x, TCP, web.v4, 80) == REFUSED
    assert ping(pair.x, web.v4) == web.v4
    step(pair)
    assert outcome(pair.x, TCP, web.v4, 80, 0.3) == SILENT
    assert ping(pair.x, web.v4, timeout=0.3) == SILENT
    (path,) = pair.lab.bpffs.glob("programs-*/maps/service_ports")
    with contextlib.closing(Map.pinned(path)) as bits:
        assert not any(word for _, value in bits.items() for word in value), (
            "the port bitmap is empty, which saves most lookups"
        )


# Clients on the node


@both_families
def test_sockets_of_pods_keep_their_endpoint(pair: TwoNodes, family: str) -> None:
    web = serve(pair)
    with connected(pair.p, TCP, web.address(family), 80) as sock:
        assert server_of(sock) == "a"
        step(pair)
        assert server_of(sock) == "a"
        assert outcome(pair.p, TCP, web.address(family), 80, 0.3) == SILENT
        assert sock.getpeername()[:2] == (web.address(family), 80)
        step(pair)
        assert server_of(sock) == "a"
        assert sock.getpeername()[:2] == (getattr(pair.a, family), TCP_TARGET)
        await_end(pair)
        assert server_of(sock) == "a"


@pytest.mark.same_for("family")
@both_families
def test_another_backends_connection_does_not_collide_with_a_rewritten_sockets(
    pair: TwoNodes, family: str
) -> None:
    """The socket hooks connected a socket to the endpoint. Later the client uses the same port for the
    frontend. The other backend would translate that to the same 4-tuple if conntrack did not know the
    socket."""
    web = serve(pair)
    number = socket.AF_INET6 if family == "v6" else socket.AF_INET
    for client in (pair.p, pair.node):
        with socket_in(client, TCP, number) as idle, socket_in(client, TCP, number) as later:
            for sock in (idle, later):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            idle.bind((getattr(client, family), 0))
            idle.connect((web.address(family), 80))
            assert server_of(idle) == "a"
            with netfilter(pair, web, pair.a, masquerade="accept"):
                step(pair)
                later.bind(idle.getsockname())
                later.connect((web.address(family), 80))
                assert server_of(later) == "a"
                assert server_of(idle) == "a"
        pair.restart()


def test_a_late_reply_to_an_unconnected_socket_comes_from_the_frontend(pair: TwoNodes) -> None:
    web = serve(pair)
    with socket_in(pair.p, UDP) as sock:
        sock.sendto(b"?", (web.v4, 53))
        step(pair)
        answer, peer = sock.recvfrom(100)
        assert (name_and_client(answer.decode())[0], peer) == ("a", (web.v4, 53))


def test_with_socket_lb_off_a_host_originated_connection_works_until_its_end(pair: TwoNodes) -> None:
    """The replies arrive at the reinjection veth pair, which is therefore kept until the connection ends."""
    web = serve(pair, OFF).to(pair.d)
    with connected(pair.node, TCP, web.v4, 80) as sock:
        assert server_of(sock) == "d"
        for _ in range(2):
            assert step(pair)[1]
            assert server_of(sock) == "d"
        assert outcome(pair.node, TCP, web.v4, 80, 0.3) == SILENT
    await_end(pair)
    assert remains(pair) == []


@pytest.mark.parametrize(("protocol", "awaited"), [(UDP, False), (TCP, True)])
def test_a_foreign_masqueraded_flow_is_awaited_only_if_it_is_tcp(
    pair: TwoNodes, protocol: Protocol, awaited: bool
) -> None:
    """Netfilter masquerades a flow of the agent to another port. A steady UDP flow must not delay the end."""
    serve(pair)
    pair.end()
    client, endpoint = parse_address(pair.node.v4), parse_address(pair.d.v4)
    now = unit_now(time.monotonic_ns())
    flow = Flow(
        *(client, endpoint, endpoint, client),
        *(1025, 80, 80, 1026),
        flags=abi.FLOW_NODE | abi.FLOW_MASQUERADE | abi.FLOW_DIRECT,
        service_id=0,
        endpoint_id=0,
        protocol=protocol,
        client_seen=now,
        endpoint_seen=now,
    )
    for name, entry in (("flows", flow.entry()), ("replies", flow.reply_entry())):
        for path in pair.lab.bpffs.glob(f"programs-*/maps/{name}"):
            with contextlib.closing(Map.pinned(path)) as entries:
                entries.update(*entry)
    step(pair)
    assert step(pair)[1] is awaited


def test_a_pod_removed_during_the_drain_is_no_error(pair: TwoNodes) -> None:
    newcomer = pair.lab.pod("newcomer")
    web = serve(pair, HOST)
    with connected(newcomer, TCP, web.v4, 80) as of_removed_pod, connected(pair.q, TCP, web.v4, 80) as sock:
        assert (server_of(of_removed_pod), server_of(sock)) == ("a", "a")
        step(pair)
        pair.lab.remove_pod(newcomer)
        assert step(pair)[1]
        assert server_of(sock) == "a"


# Mode ebpf starts again during the drain


@pytest.mark.same_for("family")
@both_families
def test_a_restart_during_the_drain_restores_everything(pair: TwoNodes, family: str) -> None:
    """Connections are found by their addresses, and sockets by ids, so the ids must be the same again."""
    web = serve(pair)
    dial = getattr(pair.node, family), web.node_port
    with contextlib.ExitStack() as stack:
        outside = stack.enter_context(connected(pair.x, TCP, *dial))
        pod = stack.enter_context(connected(pair.p, UDP, web.address(family), 53))
        assert (server_of(outside), server_of(pod)) == ("a", "a")
        step(pair)
        step(pair)
        pair.restart()
        assert (server_of(outside), server_of(pod)) == ("a", "a")
        for client in (pair.x, pair.p, pair.node):
            assert answering_server(client, TCP, *dial) == "a"
            assert answering_server(client, UDP, web.address(family), 53) == "a"
        assert pod.getpeername()[:2] == (web.address(family), 53)
        web.to(pair.b)
        assert server_of(outside) == "a"
        assert answering_server(pair.x, TCP, *dial) == "b"
        reaches(pod, "b")


def test_a_restart_during_the_drain_applies_deletions(pair: TwoNodes) -> None:
    web, other = serve(pair), pair.everywhere().to(pair.a)
    with connected(pair.p, UDP, other.v4, 53) as sock:
        assert server_of(sock) == "a"
        step(pair)
        pair.write(other.name)
        pair.restart()
        leaves(sock, "a")
    assert answering_server(pair.x, TCP, pair.node.v4, web.node_port) == "a"
    assert outcome(pair.x, TCP, pair.node.v4, other.node_port) == REFUSED


@pytest.mark.long  # a restart during the drain, and other sizes without one, run
def test_a_restart_during_the_drain_with_other_map_sizes_keeps_connections(pair: TwoNodes) -> None:
    web = serve(pair)
    with connected(pair.x, TCP, pair.node.v4, web.node_port) as sock:
        assert server_of(sock) == "a"
        step(pair)
        pair.restart("--ebpf-services-max=4096")
        eventually(
            lambda: len(list(pair.lab.bpffs.glob("programs-*"))) == 1, "the previous programs are removed"
        )
        assert server_of(sock) == "a"
        assert answering_server(pair.x, TCP, pair.node.v4, web.node_port) == "a"


# Other state on the node


def test_a_drain_is_rejected_while_an_agent_runs(pair: TwoNodes) -> None:
    web = serve(pair)
    with pytest.raises(Rejected, match="another ebpfproxy"):
        pair.node.call(lambda: Drain(pair.lab.bpffs, pair.lab.cgroup).step())
    assert answering_server(pair.x, TCP, pair.node.v4, web.node_port) == "a"


def test_state_of_version_0_1_is_removed_in_one_step(pair: TwoNodes) -> None:
    """Its folder lacks maps of this version."""
    web = serve(pair)
    with connected(pair.x, TCP, pair.node.v4, web.node_port) as sock:
        assert server_of(sock) == "a"
        pair.end()
        (folder,) = pair.lab.bpffs.glob("programs-*")
        folder.rename(folder.with_name("v2-0123456789"))
        (folder.with_name("v2-0123456789") / "maps" / "service_ports").unlink()
        assert not step(pair)[1]
    assert remains(pair) == []


def test_a_partial_programs_folder_is_ignored(pair: TwoNodes) -> None:
    web = serve(pair)
    with connected(pair.x, TCP, pair.node.v4, web.node_port) as sock:
        pair.end()
        (folder,) = pair.lab.bpffs.glob("programs-*")
        (folder.with_name("programs-0123456789_partial") / "maps").mkdir(parents=True)
        for _ in range(2):
            assert step(pair)[1]
        assert server_of(sock) == "a"


def test_without_state_there_is_nothing_to_drain(pair: TwoNodes, tmp_path: Path) -> None:
    def drain() -> list[tuple[list[str], bool]]:
        cleanup.remove(pair.lab.bpffs, pair.lab.cgroup)
        roots = (tmp_path, tmp_path / "missing", pair.lab.bpffs)
        return [Drain(root, None).step() for root in roots]

    assert pair.node.call(drain) == [([], False)] * 3


# Removal without drain


def test_a_dry_run_while_an_agent_runs_lists_what_cleanup_removes(pair: TwoNodes) -> None:
    web = serve(pair, OFF)
    lab = pair.lab
    wanted = pair.node.call(lambda: cleanup.remove(lab.bpffs, lab.cgroup, dry_run=True))
    assert answering_server(pair.x, TCP, pair.node.v4, web.node_port) == "a"
    pair.end()
    assert pair.node.call(lambda: cleanup.remove(lab.bpffs, lab.cgroup)) == wanted
    assert ("link at ingress of eth0" if tcx.is_supported() else "clsact of eth0") in wanted
    assert f"devices {reinjection.DEVICE} and {reinjection.PEER}" in wanted
    assert remains(pair) == []


def test_a_dry_run_lists_links_and_omits_a_clsact_with_foreign_filters(pair: TwoNodes) -> None:
    serve(pair)
    lab = pair.lab
    foreign = "filter add dev eth0 ingress prio 9 u32 match u32 0 0 flowid 1:1"
    pair.node.run(["tc", "qdisc", "replace", "dev", "eth0", "clsact"])
    pair.node.run(["tc", *foreign.split()])
    try:
        wanted = pair.node.call(lambda: cleanup.remove(lab.bpffs, lab.cgroup, dry_run=True))
        pair.end()
        assert pair.node.call(lambda: cleanup.remove(lab.bpffs, lab.cgroup)) == wanted
        assert wanted[: len(LINKS)] == LINKS
        assert "clsact of eth0" not in wanted
    finally:
        pair.node.run(["tc", "qdisc", "del", "dev", "eth0", "clsact"])
    assert remains(pair) == []
