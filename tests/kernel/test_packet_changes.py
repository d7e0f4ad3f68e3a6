"""External clients while the agent is killed, or restarted with the same flags or with other ones."""

import contextlib
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf.programs import LOADED
from ebpfproxy.bench.load import Load
from tests.kernel.clients import REFUSED, TCP, UDP, Dial, connected, converse, outcomes
from tests.kernel.cluster import eventually
from tests.kernel.differences import DIFFERENCES
from tests.kernel.two_nodes import TwoNodes, name_and_client

pytestmark = pytest.mark.kernel


def name_of(answer: str) -> str:
    return name_and_client(answer)[0]


@contextlib.contextmanager
def steady_load(pair: TwoNodes, load: Load, *ports: int) -> Iterator[None]:
    """Within the block external clients open connections and use existing ones. None of them may fail."""
    addresses = (pair.node.v4, pair.node.v6)
    targets = load.targets("outside", [(address, port) for address in addresses for port in ports])
    with contextlib.ExitStack() as stack:
        old = [
            stack.enter_context(connected(pair.x, protocol, address, port))
            for protocol in (TCP, UDP)
            for address in addresses
            for port in ports
        ]
        answers = [converse(sock) for sock in old]
        running = load.start_churn(pair.x, targets)
        try:
            yield
        except BaseException:
            running.kill()
            raise
        assert [converse(sock) for sock in old] == answers
    report = load.end_churn(running)
    assert (report["failed"], report["errors"]) == (0, {})
    assert report["attempts"] > 20  # there was a load; its rate depends on the machine


@pytest.mark.same_for("two_nodes")  # of mode ebpf
@pytest.mark.ways("ebpf-on", "ebpf-off")
def test_a_crash_and_a_restart_fail_no_external_connection(two_nodes: TwoNodes, load: Load) -> None:
    here, there = two_nodes.everywhere().to(two_nodes.a), two_nodes.everywhere().to(two_nodes.d)
    with steady_load(two_nodes, load, here.node_port, there.node_port):
        for _ in range(3):
            two_nodes.restart()


@pytest.mark.backends("ebpf")
def test_a_restart_with_other_map_sizes_fails_no_external_connection(
    restartable_pair: TwoNodes, load: Load
) -> None:
    """The agent fills new maps, replaces the programs and migrates the flows."""
    restartable_pair.restart()
    here, there = (
        restartable_pair.everywhere().to(restartable_pair.a),
        restartable_pair.everywhere().to(restartable_pair.d),
    )
    previous = {path.name for path in restartable_pair.lab.bpffs.glob("programs-*")}
    with steady_load(restartable_pair, load, here.node_port, there.node_port):
        restartable_pair.restart("--ebpf-services-max=4096", "--ebpf-flows-max=600000")
        eventually(
            lambda: len(list(restartable_pair.lab.bpffs.glob("programs-*"))) == 1,
            "the previous programs are removed",
        )
    assert {path.name for path in restartable_pair.lab.bpffs.glob("programs-*")}.isdisjoint(previous)


@pytest.mark.ways("ebpf-on")
def test_a_flow_map_of_odd_size_is_kept_by_a_restart(two_nodes: TwoNodes) -> None:
    """Regression: cilium commit 4b203506e5. The kernel rounds the size of an LRU map. The agent found another
    size than it had requested, and created the map again and again."""
    assert any(flag.startswith("--ebpf-flows-max=") and int(flag[-1]) % 2 for flag in two_nodes.flags)
    web = two_nodes.everywhere().to(two_nodes.d)
    previous = {path.name for path in two_nodes.lab.bpffs.glob("programs-*")}
    with connected(two_nodes.x, TCP, two_nodes.node.v4, web.node_port) as sock:
        assert name_of(converse(sock)) == "d"
        two_nodes.restart()
        assert name_of(converse(sock)) == "d"
    assert {path.name for path in two_nodes.lab.bpffs.glob("programs-*")} == previous
    assert LOADED not in two_nodes.agent.log()


def test_session_affinity_survives_syncs_and_restarts(two_nodes: TwoNodes) -> None:
    """Regression: calico commit 0bbaba8fc1, where each sync deleted the affinity of UDP clients, since two
    parts of the program wrote the same table."""
    pair = two_nodes
    web = pair.everywhere(
        sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}}
    ).to(pair.a, pair.b, pair.c, pair.d)

    def chosen() -> list[str]:
        kinds, families = ("ClusterIP", "NodePort"), ("v4", "v6")
        dials = [web.dial(kind, family, UDP) for kind in kinds for family in families]
        return [name_of(each) for client in (pair.x, pair.p, pair.node) for each in outcomes(client, dials)]

    chosen()  # concurrent first connections may choose different endpoints
    first_choice = chosen()
    assert set(first_choice) <= {"a", "b", "c", "d"}
    syncs = len(pair.agent.lines)
    pair.everywhere().to(pair.a)
    web.to(pair.a, pair.b, pair.c, pair.d, pair.e)
    assert len(pair.agent.lines) > syncs
    assert chosen() == first_choice
    if not DIFFERENCES[pair.mode].by_relay:  # whose tables end with the agent
        pair.restart()
        assert chosen() == first_choice


def test_node_ports_answer_only_at_the_addresses_of_nodeport_addresses(two_nodes: TwoNodes) -> None:
    """--nodeport-addresses as CIDRs, and as "primary", which means the addresses of the Node object."""
    pair, extra = two_nodes, "192.0.2.60"
    pair.lab.ip(pair.node, f"addr add {extra}/32 dev lo")
    pair.lab.ip(pair.lab.router, f"route add {extra} via {pair.node.v4}")
    web = pair.everywhere().to(pair.a)

    def answering() -> list[str]:
        dials = [Dial(TCP, address, web.node_port) for address in (pair.node.v4, extra)]
        return [name_of(answer) for answer in outcomes(pair.x, dials)]

    try:
        eventually(lambda: answering() == ["a", "a"], "the agent knows the new address")
        pair.restart("--nodeport-addresses=192.0.2.0/24")
        assert answering() == [REFUSED, "a"]
        pair.restart("--nodeport-addresses=primary")
        assert answering() == ["a", REFUSED]
    finally:
        pair.lab.ip(pair.node, f"addr del {extra}/32 dev lo")
        pair.lab.ip(pair.lab.router, f"route del {extra}")
        pair.restart()
