"""Another backend takes over from eBPF: what is under way goes on to its end, and nothing new is ours."""

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
from tests.kernel.two_nodes import Everywhere, TwoNodes, told

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
OFF, HOST = "--socket-lb=off", "--socket-lb=host"
LINKS = [f"link {hook.name}" for hook in reversed(SOCKET_HOOKS)]
GIVING_BACK = LINKS[6:]
PORTS = {TCP: (80, TCP_TARGET), UDP: (53, UDP_TARGET)}


@pytest.fixture
def pair(rough_pair: TwoNodes) -> TwoNodes:
    """With what the test before has left, drained or not: an agent that starts makes it good."""
    return rough_pair


def serve(pair: TwoNodes, *flags: str) -> Everywhere:
    """Have an agent serve a Service whose endpoint is a."""
    pair.restart(*flags)
    return pair.everywhere().to(pair.a)


def step(pair: TwoNodes) -> tuple[list[str], bool]:
    """In a process of its own, as after a restart: it knows nothing of the steps before."""
    pair.end()
    return pair.node.call(lambda: Drain(pair.lab.bpffs, pair.lab.cgroup).step())


def await_end(pair: TwoNodes) -> None:
    """Until nothing is left to be drained, when what is closed, and what is of UDP, is over at once."""
    for path in pair.lab.bpffs.glob("programs-*/maps/node"):
        with contextlib.closing(Map.pinned(path)) as node:
            *first, _, _, _, _, rate, burst = abi.NODE.unpack(node.lookup(bytes(4)) or b"")
            node.update(bytes(4), abi.NODE.pack(*first, 0, 0, 0, 0, rate, burst))
    eventually(lambda: not step(pair)[1], "everything is removed")


def remains(pair: TwoNodes) -> list[object]:
    """What the eBPF backend has on the first node: pins, programs, qdiscs, devices."""

    def on_devices() -> list[object]:
        names = links.names()
        clsacts = [f"clsact of {name}" for ifindex, name in names.items() if tc.has_clsact(ifindex)]
        return [
            *clsacts,
            *(name for name in names.values() if name in (reinjection.DEVICE, reinjection.PEER)),
        ]

    # The kernel itself may put maps.debug and the like there (bpf_preload); nobody else may have dots.
    pins: list[object] = [path for path in pair.lab.bpffs.iterdir() if "." not in path.name]
    hooks = (cgroup.programs(pair.lab.cgroup, hook.attach_type) for hook in SOCKET_HOOKS)
    return pins + [ids for ids in hooks if ids] + pair.node.call(on_devices)


def asks(client: Pod, protocol: Protocol, address: str, port: int) -> str:
    """The name of whoever answers."""
    return told(outcome(client, protocol, address, port, 5.0))[0]


def says(sock: socket.socket) -> str:
    return told(converse(sock))[0]


@contextlib.contextmanager
def netfilter(
    pair: TwoNodes, web: Everywhere, pod: Pod, masquerade: str = "masquerade random"
) -> Iterator[None]:
    """Within the block, rules send what is for the Service to a pod, as another backend would."""
    rules = []
    for family, ip in (("v4", "ip"), ("v6", "ip6")):
        for protocol, (port, target) in PORTS.items():
            to = getattr(pod, family)
            to = f"{to}:{target}" if family == "v4" else f"[{to}]:{target}"
            for address, dialed in ((web.address(family), port), (getattr(pair.node, family), web.node_port)):
                name = protocol.name.lower()
                rules.append(f"{ip} daddr {address} {name} dport {dialed} dnat {ip} to {to}")
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


# Connections from outside


@pytest.mark.parametrize(("family", "place"), [("v4", "here"), ("v6", "there")])
def test_a_connection_from_outside_goes_on_to_its_end_and_new_ones_are_refused(
    pair: TwoNodes, family: str, place: str
) -> None:
    web = serve(pair).to(pair.a if place == "here" else pair.d)
    address = getattr(pair.node, family)
    name = asks(pair.x, TCP, address, web.node_port)
    with connected(pair.x, TCP, address, web.node_port) as sock:
        assert says(sock) == name
        removed, left = step(pair)
        assert (removed[:6], left) == (LINKS[:6], True)
        assert removed[6].endswith(" frontends")
        assert says(sock) == name
        assert outcome(pair.x, TCP, address, web.node_port) == REFUSED, "nobody listens there"
        no_answer = REFUSED, SILENT  # the kernel sends no more than some ICMP errors a second
        assert outcome(pair.x, UDP, address, web.node_port, 0.3) in no_answer
        assert step(pair) == (GIVING_BACK, True)
        assert step(pair) == ([], True)
        assert says(sock) == name
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b"", "the end is told, too"
    await_end(pair)
    assert remains(pair) == []
    assert step(pair) == ([], False)


@both_families
def test_what_is_new_is_the_other_backends_at_once(pair: TwoNodes, family: str) -> None:
    """Old connections, which that one knows nothing of, keep their endpoint; UDP's next datagram does not."""
    web = serve(pair).to(pair.d)
    dial = getattr(pair.node, family), web.node_port
    with connected(pair.x, TCP, *dial) as stream, connected(pair.x, UDP, *dial) as datagrams:
        assert (says(stream), says(datagrams)) == ("d", "d")
        with netfilter(pair, web, pair.b):
            assert asks(pair.x, TCP, *dial) == "d", "it is ours as long as it is not drained"
            step(pair)
            assert says(stream) == "d"
            assert says(datagrams) == "b"
            for client in (pair.x, pair.p, pair.node):
                for protocol in (TCP, UDP):
                    assert asks(client, protocol, *dial) == "b"
                    assert asks(client, protocol, web.address(family), PORTS[protocol][0]) == "b"
            step(pair)
            assert says(stream) == "d"
            stream.close()
            await_end(pair)
            assert remains(pair) == []
            assert says(datagrams) == "b"
            assert asks(pair.x, TCP, *dial) == "b"


def test_an_answer_under_way_to_a_client_outside_is_given_back(pair: TwoNodes) -> None:
    """From here, masqueraded and not: what an endpoint sends needs no Service any more."""
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
    """A socket of a pod where its UDP server would be."""
    made = socket_in(pod, UDP)
    made.bind((getattr(pod, family), UDP_TARGET))
    return made


def test_what_refused_and_answered_does_so_no_more(pair: TwoNodes) -> None:
    web = serve(pair)
    web.to()
    assert outcome(pair.x, TCP, web.v4, 80) == REFUSED
    assert ping(pair.x, web.v4) == web.v4
    step(pair)
    assert outcome(pair.x, TCP, web.v4, 80, 0.3) == SILENT
    assert ping(pair.x, web.v4, timeout=0.3) == SILENT
    (path,) = pair.lab.bpffs.glob("programs-*/maps/service_ports")
    with contextlib.closing(Map.pinned(path)) as bits:
        assert not any(word for _, value in bits.items() for word in value), "most packets cost no lookup"


# Clients on the node


@both_families
def test_sockets_of_pods_keep_their_endpoint(pair: TwoNodes, family: str) -> None:
    web = serve(pair)
    with connected(pair.p, TCP, web.address(family), 80) as sock:
        assert says(sock) == "a"
        step(pair)
        assert says(sock) == "a"
        assert outcome(pair.p, TCP, web.address(family), 80, 0.3) == SILENT
        assert sock.getpeername()[:2] == (web.address(family), 80)
        step(pair)
        assert says(sock) == "a"
        assert sock.getpeername()[:2] == (getattr(pair.a, family), TCP_TARGET)
        await_end(pair)
        assert says(sock) == "a"


@both_families
def test_a_translated_connection_does_not_get_the_port_of_an_idle_one_of_a_socket(
    pair: TwoNodes, family: str
) -> None:
    """The socket is connected to the endpoint from a port from which the client may dial the frontend later.
    The other backend translates that to the same addresses and ports, unless conntrack knows the socket."""
    web = serve(pair)
    number = socket.AF_INET6 if family == "v6" else socket.AF_INET
    for client in (pair.p, pair.node):
        with socket_in(client, TCP, number) as idle, socket_in(client, TCP, number) as later:
            for sock in (idle, later):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            idle.bind((getattr(client, family), 0))
            idle.connect((web.address(family), 80))
            assert says(idle) == "a"
            with netfilter(pair, web, pair.a, masquerade="accept"):
                step(pair)
                later.bind(idle.getsockname())
                later.connect((web.address(family), 80))
                assert says(later) == "a"
                assert says(idle) == "a"
        pair.restart()


def test_an_answer_under_way_to_a_socket_without_a_peer_comes_from_whom_it_asked(pair: TwoNodes) -> None:
    web = serve(pair)
    with socket_in(pair.p, UDP) as sock:
        sock.sendto(b"?", (web.v4, 53))
        step(pair)
        answer, peer = sock.recvfrom(100)
        assert (told(answer.decode())[0], peer) == ("a", (web.v4, 53))


def test_the_nodes_own_connection_goes_on_where_no_socket_is_looked_at(pair: TwoNodes) -> None:
    """Its replies come in by the inner, which therefore stays as long."""
    web = serve(pair, OFF).to(pair.d)
    with connected(pair.node, TCP, web.v4, 80) as sock:
        assert says(sock) == "d"
        for _ in range(2):
            assert step(pair)[1]
            assert says(sock) == "d"
        assert outcome(pair.node, TCP, web.v4, 80, 0.3) == SILENT
    await_end(pair)
    assert remains(pair) == []


@pytest.mark.parametrize(("protocol", "stays"), [(UDP, False), (TCP, True)])
def test_of_what_others_masquerade_only_a_connection_is_waited_for(
    pair: TwoNodes, protocol: Protocol, stays: bool
) -> None:
    """It has another port for a flow of ours: datagrams that never cease do without."""
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
    assert step(pair)[1] is stays


def test_a_pod_that_goes_meanwhile_is_no_error(pair: TwoNodes) -> None:
    newcomer = pair.lab.pod("newcomer")
    web = serve(pair, HOST)
    with connected(newcomer, TCP, web.v4, 80) as gone, connected(pair.q, TCP, web.v4, 80) as sock:
        assert (says(gone), says(sock)) == ("a", "a")
        step(pair)
        pair.lab.remove_pod(newcomer)
        assert step(pair)[1]
        assert says(sock) == "a"


# The way back


@both_families
def test_back_in_the_middle_everything_is_as_before(pair: TwoNodes, family: str) -> None:
    """Connections are found by their addresses, sockets by ids, which therefore have to be the same again."""
    web = serve(pair)
    dial = getattr(pair.node, family), web.node_port
    with contextlib.ExitStack() as stack:
        outside = stack.enter_context(connected(pair.x, TCP, *dial))
        pod = stack.enter_context(connected(pair.p, UDP, web.address(family), 53))
        assert (says(outside), says(pod)) == ("a", "a")
        step(pair)
        step(pair)
        pair.restart()
        assert (says(outside), says(pod)) == ("a", "a")
        for client in (pair.x, pair.p, pair.node):
            assert asks(client, TCP, *dial) == "a"
            assert asks(client, UDP, web.address(family), 53) == "a"
        assert pod.getpeername()[:2] == (web.address(family), 53)
        web.to(pair.b)
        assert says(outside) == "a"
        assert asks(pair.x, TCP, *dial) == "b"
        reaches(pod, "b")


def test_back_in_the_middle_what_went_meanwhile_is_gone(pair: TwoNodes) -> None:
    web, other = serve(pair), pair.everywhere().to(pair.a)
    with connected(pair.p, UDP, other.v4, 53) as sock:
        assert says(sock) == "a"
        step(pair)
        pair.write(other.name)
        pair.restart()
        leaves(sock, "a")
    assert asks(pair.x, TCP, pair.node.v4, web.node_port) == "a"
    assert outcome(pair.x, TCP, pair.node.v4, other.node_port) == REFUSED


def test_back_in_the_middle_with_maps_of_other_sizes_connections_come_along(pair: TwoNodes) -> None:
    web = serve(pair)
    with connected(pair.x, TCP, pair.node.v4, web.node_port) as sock:
        assert says(sock) == "a"
        step(pair)
        pair.restart("--ebpf-services-max=4096")
        eventually(lambda: len(list(pair.lab.bpffs.glob("programs-*"))) == 1, "the previous programs go")
        assert says(sock) == "a"
        assert asks(pair.x, TCP, pair.node.v4, web.node_port) == "a"


# What else may be there


def test_an_agent_that_serves_is_left_alone(pair: TwoNodes) -> None:
    web = serve(pair)
    with pytest.raises(Rejected, match="another ebpfproxy"):
        pair.node.call(lambda: Drain(pair.lab.bpffs, pair.lab.cgroup).step())
    assert asks(pair.x, TCP, pair.node.v4, web.node_port) == "a"


def test_connections_by_maps_of_version_0_1_end(pair: TwoNodes) -> None:
    """Nobody can tell from them which are alive; and their programs would go on taking new ones."""
    web = serve(pair)
    with connected(pair.x, TCP, pair.node.v4, web.node_port) as sock:
        assert says(sock) == "a"
        pair.end()
        (folder,) = pair.lab.bpffs.glob("programs-*")
        folder.rename(folder.with_name("v2-0123456789"))
        (folder.with_name("v2-0123456789") / "programs_1").mkdir()
        assert not step(pair)[1]
    assert remains(pair) == []


def test_programs_that_were_not_finished_are_ignored(pair: TwoNodes) -> None:
    web = serve(pair)
    with connected(pair.x, TCP, pair.node.v4, web.node_port) as sock:
        pair.end()
        (folder,) = pair.lab.bpffs.glob("programs-*")
        (folder.with_name("programs-0123456789_partial") / "maps").mkdir(parents=True)
        for _ in range(2):
            assert step(pair)[1]
        assert says(sock) == "a"


def test_where_nothing_was_there_is_nothing_to_retire(pair: TwoNodes, tmp_path: Path) -> None:
    def drain() -> list[tuple[list[str], bool]]:
        cleanup.remove(pair.lab.bpffs, pair.lab.cgroup)
        roots = (tmp_path, tmp_path / "missing", pair.lab.bpffs)
        return [Drain(root, None).step() for root in roots]

    assert pair.node.call(drain) == [([], False)] * 3


# Removal at once


def test_a_dry_run_beside_an_agent_lists_what_is_removed_then(pair: TwoNodes) -> None:
    web = serve(pair, OFF)
    lab = pair.lab
    wanted = pair.node.call(lambda: cleanup.remove(lab.bpffs, lab.cgroup, dry_run=True))
    assert asks(pair.x, TCP, pair.node.v4, web.node_port) == "a"
    pair.end()
    assert pair.node.call(lambda: cleanup.remove(lab.bpffs, lab.cgroup)) == wanted
    assert ("link at ingress of eth0" if tcx.is_supported() else "clsact of eth0") in wanted
    assert f"devices {reinjection.DEVICE} and {reinjection.PEER}" in wanted
    assert remains(pair) == []


def test_a_dry_run_lists_links_and_no_clsact_that_others_use(pair: TwoNodes) -> None:
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
