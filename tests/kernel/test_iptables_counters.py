"""Mode iptables counts INVALID packets and connections to NodePorts on 127.0.0.0/8, as kube-proxy does."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6

from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.backends.iptables import cleanup, packet_counters, probes
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.chains import INVALID_DROPPED, LOCALHOST_NODE_PORTS, counting
from ebpfproxy.backends.iptables.entries import Entry, Key, Rule
from ebpfproxy.backends.iptables.mode import IptablesMode
from ebpfproxy.backends.iptables.rules import IptablesSettings
from ebpfproxy.config import Config
from ebpfproxy.lab import Lab, sockets
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import nfacct
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.counters import PacketCounts
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan
from tests.kernel.clients import outcome
from tests.kernel.cluster import Cluster
from tests.kernel.iptables_testbed import TARGET, TOOL_BACKENDS, Testbed, empty_node, endpoints, on_node
from tests.support.build import port, service
from tests.support.missing import skip_or_fail

pytestmark = pytest.mark.kernel

NODE_PORT = 30080
COUNTED = counting(LOCALHOST_NODE_PORTS)
PATIENCE = 30.0

Plans = tuple[ServicePortPlan, ...]


@pytest.fixture(params=TOOL_BACKENDS)
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    with empty_node(request.param) as made:
        need_nfacct(made)
        yield made


def need_nfacct(testbed: Testbed) -> None:
    tool = iptables.find(Family.IPV4, testbed.tool_backend)
    if not probes.accepts(tool, probes.PACKET_COUNTERS, packet_counters.prepare):
        skip_or_fail("the kernel has no nfacct")


def web(testbed: Testbed, name: str = "web", address: str = "10.96.0.10", number: int = NODE_PORT) -> Plans:
    plans = testbed.plans(
        service(name, port(80, node_port=number), ips=(address,)), endpoints(name, "10.1.0.1")
    )
    assert plans
    return plans


def node_ports(testbed: Testbed) -> list[bool]:
    """Whether each rule of KUBE-NODEPORTS counts, in order."""
    return [LOCALHOST_NODE_PORTS in rule for rule in testbed.rules("nat", "KUBE-NODEPORTS")]


def test_rules_that_count_come_first_in_a_chain_of_several_node_ports(testbed: Testbed) -> None:
    wanted = testbed.wanted(web(testbed))
    assert not testbed.bring(wanted)
    assert node_ports(testbed) == [True, False]
    wanted |= testbed.wanted(web(testbed, "api", "10.96.0.11", 30081))
    assert not testbed.bring(wanted)
    assert node_ports(testbed) == [True, True, False, False]
    assert testbed.plane.read() == wanted
    assert testbed.plane.report().syncs[-1] == PacketCounts(0, 0)


def without_counting(wanted: dict[Key, Entry]) -> dict[Key, Entry]:
    """The entries of a version that did not count."""
    entries = {
        key: entry for key, entry in wanted.items() if not (isinstance(key, Rule) and COUNTED in key.text)
    }
    for key, entry in entries.items():
        if isinstance(entry, tuple):
            entries[key] = tuple(rule.replace(f"{counting(INVALID_DROPPED)} ", "") for rule in entry)
    return entries


def test_after_an_upgrade_the_rules_that_count_come_first(testbed: Testbed) -> None:
    wanted = testbed.wanted(web(testbed))
    former = without_counting(wanted)
    assert former != wanted
    assert not testbed.bring(former)
    assert node_ports(testbed) == [False]
    assert not testbed.bring(wanted)
    assert node_ports(testbed) == [True, False]
    assert testbed.plane.read() == wanted


def test_a_rule_before_one_that_counts_is_moved_behind_it(testbed: Testbed) -> None:
    wanted = testbed.wanted(web(testbed), web(testbed, "api", "10.96.0.11", 30081))
    assert not testbed.bring(wanted)
    counted, also_counted, usual, also_usual = testbed.rules("nat", "KUBE-NODEPORTS")
    lines = "".join(f"-A KUBE-NODEPORTS {rule}\n" for rule in (usual, counted, also_counted, also_usual))
    testbed.restore(f"*nat\n-F KUBE-NODEPORTS\n{lines}COMMIT\n")
    (misplaced,) = diff(testbed.plane.read(), wanted).puts
    assert isinstance(misplaced, Rule)
    assert misplaced.text == usual.replace("  ", " ")
    assert not testbed.bring(wanted)
    assert node_ports(testbed) == [True, True, False, False]


@pytest.mark.parametrize(
    "command", ["-t nat -D KUBE-NODEPORTS 1", "-t nat -D KUBE-NODEPORTS 2", "-D KUBE-FORWARD 1", "-t nat -F"]
)
def test_a_missing_rule_is_detected_and_written_in_its_place(command: str, testbed: Testbed) -> None:
    wanted = testbed.wanted(web(testbed))
    assert not testbed.bring(wanted)
    before = testbed.plane.generation()
    testbed.iptables(command)
    assert testbed.plane.generation() != before
    assert diff(testbed.plane.read(), wanted)
    assert not testbed.bring(wanted)
    assert testbed.plane.read() == wanted
    assert node_ports(testbed) == [True, False]


def test_counters_that_were_deleted_with_the_rules_are_created_again(testbed: Testbed) -> None:
    wanted = testbed.wanted(web(testbed))
    assert not testbed.bring(wanted)
    for table in ("filter", "nat"):
        testbed.iptables(f"-t {table} -F")
        command = [f"ip6tables-{testbed.tool_backend}", "-w", "-t", table, "-F"]
        subprocess.run(command, check=True, timeout=60)
    assert packet_counters.remove(rules_removed=True)
    assert not packet_counters.exist()
    assert not testbed.bring(wanted)
    assert testbed.plane.read() == wanted


def test_counts_survive_a_restart_and_a_change_of_rules(testbed: Testbed) -> None:
    assert not testbed.bring(testbed.wanted(web(testbed)))
    testbed.iptables(f"-t nat -A OUTPUT -p udp --dport 9 {counting(LOCALHOST_NODE_PORTS)}")
    netns.set_loopback_up()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"", ("127.0.0.1", 9))
    assert nfacct.packets(LOCALHOST_NODE_PORTS) == 1
    testbed.plane.close()
    testbed.plane = testbed.another_run()
    assert not testbed.bring(testbed.wanted())
    assert not testbed.bring(testbed.wanted(web(testbed)))
    assert testbed.plane.report().syncs[-1] == PacketCounts(0, 1)


def test_a_reader_expects_what_the_agent_writes(testbed: Testbed) -> None:
    wanted = testbed.wanted(web(testbed))
    assert not testbed.bring(wanted)
    reader = IptablesBackend(IptablesSettings(), testbed.tool_backend)
    reader.open_to_read()
    assert reader.render(web(testbed), testbed.node) == wanted == reader.read()


def test_cleanup_removes_the_counters_after_the_rules(testbed: Testbed) -> None:
    assert not testbed.bring(testbed.wanted(web(testbed)))
    lines = {f"nfacct counter {name}" for name in packet_counters.NAMES}
    assert lines <= set(cleanup.remove(dry_run=True))
    assert packet_counters.exist()
    assert lines <= set(cleanup.remove())
    assert not packet_counters.exist()
    assert cleanup.remove() == []


def test_a_switch_to_another_mode_removes_the_counters(testbed: Testbed) -> None:
    assert not testbed.bring(testbed.wanted(web(testbed)))
    removed, _ = cleanup.drain(lambda family: False)
    assert {f"nfacct counter {name}" for name in packet_counters.NAMES} <= set(removed)
    assert not packet_counters.exist()
    assert cleanup.drain(lambda family: False) == ([], False)


def test_a_counter_that_another_program_uses_is_kept(testbed: Testbed) -> None:
    assert not testbed.bring(testbed.wanted(web(testbed)))
    testbed.iptables(f"-A OUTPUT {counting(INVALID_DROPPED)}")
    removed = cleanup.remove()
    assert f"nfacct counter {LOCALHOST_NODE_PORTS}" in removed
    assert f"nfacct counter {INVALID_DROPPED}" not in removed
    assert nfacct.packets(INVALID_DROPPED) is not None


@pytest.fixture
def _without_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """iptables finds all of its extensions but libxt_nfacct.so."""
    (installed,) = {file.parent for file in Path("/usr/lib").rglob("libxt_nfacct.so")}
    for file in installed.iterdir():
        if file.name != "libxt_nfacct.so":
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.setenv("XTABLES_LIBDIR", str(tmp_path))


@pytest.mark.usefixtures("_without_extension")
@pytest.mark.parametrize("tool_backend", TOOL_BACKENDS)
def test_without_the_extension_of_the_tool_services_are_served_without_counting(tool_backend: str) -> None:
    with empty_node(tool_backend) as testbed:  # type: ignore[arg-type]
        wanted = testbed.wanted(web(testbed))
        assert not testbed.bring(wanted)
        assert node_ports(testbed) == [False]
        assert "INVALID -j DROP" in testbed.rules("filter", "KUBE-FORWARD")[0]
        assert not packet_counters.exist()
        assert len(testbed.plane.report().syncs) == 2
        lacking = [each for each in probes.probe(tool_backend) if not each.present]
        assert {each.feature.partition(" (")[0] for each in lacking} == {"packet counters"}
        assert not any(each.needed for each in lacking)
        assert not packet_counters.exist(), "probes leave no counter"


_AGENT = """
import sys
from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.rules import IptablesSettings
from ebpfproxy.plan.service_plan import NodePlan
plane = IptablesBackend(IptablesSettings(), sys.argv[1])
plane.open()
assert not plane.apply(diff(plane.read(), plane.render((), NodePlan())))
"""


def test_without_permission_to_try_rules_the_agent_counts_nothing_and_a_reader_agrees(
    testbed: Testbed,
) -> None:
    """The agent has no CAP_SYS_ADMIN, the reader has it."""
    confined = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    agent = [sys.executable, "-c", _AGENT, testbed.tool_backend]
    subprocess.run([*confined, *agent], check=True, timeout=60)
    assert "INVALID -j DROP" in testbed.rules("filter", "KUBE-FORWARD")[0]
    assert not packet_counters.exist()
    reader = IptablesBackend(IptablesSettings(), testbed.tool_backend)
    reader.open_to_read()
    assert reader.render((), NodePlan()) == reader.read()


@pytest.mark.parametrize(("localhost", "expected"), [("true", [True, False]), ("false", [False])])
def test_without_node_ports_on_localhost_nothing_counts_them(localhost: str, expected: list[bool]) -> None:
    with empty_node(TOOL_BACKENDS[0]) as testbed:
        need_nfacct(testbed)
        texts = {"hostname_override": "here", "iptables_backend": str(testbed.tool_backend)}
        config = Config.parse(
            texts | {"conntrack_max_per_core": "0", "iptables_localhost_nodeports": localhost}
        )
        callbacks = Callbacks()
        serving = ActiveMode(IptablesMode(), config, callbacks)
        serving.open()
        try:
            web_service = service("web", port(80, node_port=NODE_PORT))
            slices = {web_service.name: (endpoints("web", "10.1.0.1"),)}
            serving.plan_all(ClusterState({web_service.name: web_service}, slices))
            assert serving.sync(verify=True).rejected == 0
            assert node_ports(testbed) == expected
            assert PacketCounts(0, 0) in serving.report().syncs
        finally:
            serving.close()


# With packets


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("test-counted", 91) as made:
        for name in ("one", "two"):
            made.pod(name).serve_echo(Protocol.TCP, TARGET)
        yield made


@pytest.fixture(params=TOOL_BACKENDS)
def node(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Testbed]:
    with on_node(lab, request.param) as made:
        need_nfacct(made)
        yield made
        assert cleanup.remove()
        assert not packet_counters.exist()


def test_a_connection_to_a_node_port_on_localhost_is_counted_once(lab: Lab, node: Testbed) -> None:
    one = lab.pods["one"]
    plans = node.plans(service("web", port(80, node_port=NODE_PORT)), endpoints("web", one.v4))
    assert not node.bring(node.wanted(plans))
    sysctl.ensure("net/ipv4/conf/all/route_localnet", "1")
    for count, address in enumerate(("127.0.0.1", "127.0.0.1", "127.0.0.2"), start=1):
        assert sockets.ask(Protocol.TCP, address, NODE_PORT, PATIENCE).split()[0] == "one"
        assert node.plane.report().syncs[-1] == PacketCounts(0, count)
    assert lab.outside.ask(Protocol.TCP, lab.node.v4, NODE_PORT, PATIENCE).split()[0] == "one"
    assert node.plane.report().syncs[-1] == PacketCounts(0, 3)


def test_invalid_packets_are_dropped_and_counted(lab: Lab, node: Testbed) -> None:
    one, two = lab.pods["one"], lab.pods["two"]
    assert not node.bring(node.wanted())
    assert node.plane.report().syncs[-1] == PacketCounts(0, 0)
    segment = TCP(sport=4000, dport=TARGET, flags="SF")  # no valid combination of flags
    packets = IP(src=two.v4, dst=one.v4) / segment, IPv6(src=two.v6, dst=one.v6) / segment
    with netns.entered(two.netns):
        for family, packet in zip((socket.AF_INET, socket.AF_INET6), packets, strict=True):
            with socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
                sock.sendto(bytes(packet), (packet.dst, 0))
    assert node.plane.report().syncs[-1] == PacketCounts(2, 0)
    assert " -c 1 " in node.iptables("-v -S KUBE-FORWARD").splitlines()[1]


ACCEPTED = "kubeproxy_iptables_localhost_nodeports_accepted_packets_total"


@pytest.mark.same_for("tool_backend")
@pytest.mark.parametrize("tool_backend", TOOL_BACKENDS)
def test_metrics_of_an_agent_continue_after_a_restart_until_cleanup(tool_backend: str) -> None:
    with Lab("test-metrics", 92) as lab, Cluster(lab, "iptables") as cluster:
        with netns.entered(lab.node.netns), empty_node(TOOL_BACKENDS[0]) as testbed:
            need_nfacct(testbed)
        flags = ("--proxy-mode=iptables", f"--iptables-backend={tool_backend}")
        cluster.start(*flags)
        web = cluster.service(node_port=True).to(cluster.a)
        for count in (1, 2):
            assert outcome(cluster.node, Protocol.TCP, "127.0.0.1", web.node_port) == "a"
            assert cluster.metric(ACCEPTED) == count
            cluster.end()
            cluster.start(*flags)
        assert cluster.metric(ACCEPTED) == 2
        assert "kubeproxy_iptables_ct_state_invalid_dropped_packets_total 0.0" in cluster.http_get("metrics")
        cluster.end()
        cluster.ebpfproxy("cleanup")
        with netns.entered(lab.node.netns):
            assert not packet_counters.exist()
