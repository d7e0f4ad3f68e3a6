"""Foreign changes to the agent's chains and rules are detected and repaired; foreign rules are kept."""

import contextlib
import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.chains import service_chains
from ebpfproxy.backends.iptables.entries import NAT, Chain, Entry, Key, Rule, RulePosition
from ebpfproxy.backends.iptables.rules import IptablesSettings
from ebpfproxy.errors import NotFound
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import legacy
from ebpfproxy.linux.xtables.iptables import ToolBackend
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.model.service import ServicePortName
from tests.kernel.iptables_testbed import TOOL_BACKENDS, Testbed, empty_node, endpoints
from tests.support.build import port, service

pytestmark = pytest.mark.kernel

WEB = ServicePortName("default", "web", "", Protocol.TCP)
SVC = service_chains(WEB).cluster
SSH = "-p tcp -m tcp --dport 22 -j ACCEPT"


@pytest.fixture(params=TOOL_BACKENDS)
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    with empty_node(request.param) as made:
        yield made


def cluster(testbed: Testbed) -> dict[Key, Entry]:
    web = service("web", port(80, node_port=30080))
    api = service("api", ips=("10.96.0.11",))
    return testbed.wanted(
        testbed.plans(web, endpoints("web", "10.1.0.1", "10.1.0.2")),
        testbed.plans(api, endpoints("api", "10.1.0.3")),
        testbed.plans(service("idle", ips=("10.96.0.12",))),
    )


@pytest.mark.parametrize(
    "command",
    [
        f"-t nat -D {SVC} 1",
        f"-t nat -F {SVC}",
        f"-t nat -A {SVC} -j ACCEPT",
        f"-t nat -I {SVC} -s 192.0.2.77 -j RETURN",
        f"-t nat -R {SVC} 1 -m comment --comment other -j KUBE-MARK-MASQ",
        "-t nat -D KUBE-SERVICES 1",
        "-t nat -F KUBE-SERVICES",
        "-t nat -A KUBE-SERVICES -d 192.0.2.77 -j RETURN",
        "-t nat -F KUBE-MARK-MASQ",
        "-t nat -D PREROUTING 1",
        "-t nat -F PREROUTING",
        "-t nat -F",
        "-F",
        "-F KUBE-FORWARD",
        "-t mangle -X KUBE-PROXY-CANARY",
        "-t nat -N KUBE-SVC-AAAAAAAAAAAAAAAA",
    ],
)
def test_foreign_changes_are_detected_and_repaired(command: str, testbed: Testbed) -> None:
    wanted = cluster(testbed)
    assert not testbed.bring(wanted)
    before = testbed.plane.generation()
    testbed.iptables(command)
    assert testbed.plane.generation() != before
    assert diff(testbed.plane.read(), wanted)
    assert not testbed.bring(wanted)
    assert testbed.plane.read() == wanted


def test_a_foreign_edit_of_equal_size_is_detected_and_repaired(testbed: Testbed) -> None:
    wanted = cluster(testbed)
    assert not testbed.bring(wanted)
    before = testbed.plane.generation()
    chain = next(key.name for key in wanted if isinstance(key, Chain) and key.name.startswith("KUBE-SEP-"))
    testbed.iptables(f"-t nat -R {chain} 2 -p tcp -m tcp -j DNAT --to-destination 192.0.2.77:1")
    assert testbed.plane.generation() != before
    assert not testbed.bring(wanted)
    assert testbed.plane.read() == wanted


def test_a_foreign_change_just_before_the_agents_own_change_is_detected(testbed: Testbed) -> None:
    """A proxier records the generation after its sync. It must not be the generation of unread tables."""
    wanted = cluster(testbed)
    assert not testbed.bring(wanted)
    testbed.iptables("-t nat -F PREROUTING")
    more = testbed.wanted(testbed.plans(service("more", ips=("10.96.0.99",)), endpoints("more", "10.1.0.9")))
    testbed.plane.apply(diff(wanted, wanted | more))
    before = testbed.plane.generation()
    assert testbed.plane.generation() != before
    assert not testbed.bring(wanted | more)
    before = testbed.plane.generation()
    assert testbed.plane.generation() == before


def test_removed_chains_are_created_again(testbed: Testbed) -> None:
    wanted = cluster(testbed)
    assert not testbed.bring(wanted)
    before = testbed.plane.generation()
    for table in ("filter", "nat", "mangle"):
        testbed.iptables(f"-t {table} -F")
        testbed.iptables(f"-t {table} -X")
    assert testbed.plane.generation() != before
    assert not testbed.bring(wanted)
    assert testbed.plane.read() == wanted


def test_a_delta_is_applied_although_the_chains_it_replaces_were_flushed(testbed: Testbed) -> None:
    """The delta removes one Service and adds others, while all chains have been flushed since the last
    read."""
    deleted = testbed.plans(service("deleted", ips=("10.96.0.99",)), endpoints("deleted", "10.1.0.9"))
    before = testbed.wanted(deleted)
    assert not testbed.bring(before)
    for table in ("filter", "nat"):
        testbed.iptables(f"-t {table} -F")
    delta = diff(before, cluster(testbed))
    assert not testbed.plane.apply(delta)
    assert testbed.plane.read().items() >= delta.puts.items()


def test_a_rule_removed_before_its_move_is_added(testbed: Testbed) -> None:
    wanted = cluster(testbed)
    assert not testbed.bring(wanted)
    last = testbed.rules("nat", "KUBE-SERVICES")[-1]
    testbed.restore(f"*nat\n-D KUBE-SERVICES {last}\n-I KUBE-SERVICES {last}\nCOMMIT\n")
    delta = diff(testbed.plane.read(), wanted)
    testbed.iptables("-t nat -D KUBE-SERVICES 1")
    assert not testbed.plane.apply(delta)
    assert testbed.plane.read() == wanted


def test_a_shared_chain_created_by_the_kubelet_keeps_its_rules(testbed: Testbed) -> None:
    wanted = cluster(testbed)
    delta = diff(testbed.plane.read(), wanted)
    kubelets = "-m mark --mark 0x8000/0x8000 -j DROP"
    testbed.restore(f"*filter\n:KUBE-FIREWALL - [0:0]\n-A KUBE-FIREWALL {kubelets}\nCOMMIT\n")
    assert not testbed.plane.apply(delta)
    assert testbed.plane.read() == wanted
    assert kubelets in testbed.rules("filter", "KUBE-FIREWALL")


def test_duplicate_rules_are_reduced_to_one(testbed: Testbed) -> None:
    wanted = cluster(testbed)
    assert not testbed.bring(wanted)
    rule, jump = testbed.rules("nat", "KUBE-SERVICES")[0], testbed.rules("nat", "PREROUTING")[0]
    for _ in range(2):
        testbed.restore(f"*nat\n-I KUBE-SERVICES {rule}\n-I PREROUTING {jump}\nCOMMIT\n")
    assert not testbed.bring(wanted)
    assert testbed.plane.read() == wanted
    assert testbed.rules("nat", "KUBE-SERVICES").count(rule) == 1
    assert len(testbed.rules("nat", "PREROUTING")) == 1


def test_the_node_port_jump_stays_the_last_rule(testbed: Testbed) -> None:
    """KUBE-NODEPORTS stays last when Services are added, and is moved back to the end."""
    last = "-j KUBE-NODEPORTS"
    assert not testbed.bring(testbed.wanted(testbed.plans(service("web"), endpoints("web", "10.1.0.1"))))
    assert testbed.rules("nat", "KUBE-SERVICES")[-1].endswith(last)
    wanted = cluster(testbed)
    assert not testbed.bring(wanted)
    assert testbed.rules("nat", "KUBE-SERVICES")[-1].endswith(last)
    moved = testbed.rules("nat", "KUBE-SERVICES")[-1]
    testbed.restore(f"*nat\n-D KUBE-SERVICES {moved}\n-I KUBE-SERVICES {moved}\nCOMMIT\n")
    (misplaced,) = diff(testbed.plane.read(), wanted).puts.items()
    assert misplaced == (Rule(Family.IPV4, NAT, "KUBE-SERVICES", moved), RulePosition.LAST)
    assert not testbed.bring(wanted)
    assert testbed.rules("nat", "KUBE-SERVICES")[-1] == moved


def test_jumps_precede_all_other_rules_in_kube_proxys_order(testbed: Testbed) -> None:
    testbed.restore(f"*filter\n-A INPUT {SSH}\n-A FORWARD {SSH}\nCOMMIT\n")
    assert not testbed.bring(cluster(testbed))
    targets = [rule.rpartition(" ")[2] for rule in testbed.rules("filter", "INPUT")]
    assert targets == [
        "KUBE-FIREWALL",
        "KUBE-PROXY-FIREWALL",
        "KUBE-NODEPORTS",
        "KUBE-EXTERNAL-SERVICES",
        "ACCEPT",
    ]
    targets = [rule.rpartition(" ")[2] for rule in testbed.rules("filter", "FORWARD")]
    assert targets == [
        "KUBE-PROXY-FIREWALL",
        "KUBE-FORWARD",
        "KUBE-SERVICES",
        "KUBE-EXTERNAL-SERVICES",
        "ACCEPT",
    ]


def test_foreign_chains_and_rules_are_kept(testbed: Testbed) -> None:
    testbed.restore(
        "*filter\n:KUBE-FIREWALL - [0:0]\n:DOCKER - [0:0]\n"
        "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP\n-A INPUT -j KUBE-FIREWALL\n"
        f"-A FORWARD -j DOCKER\n-A DOCKER {SSH}\nCOMMIT\n"
        "*nat\n:KUBE-KUBELET-CANARY - [0:0]\n:CNI-HOSTPORT - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n"
        "-A CNI-HOSTPORT -j KUBE-MARK-MASQ\n-A POSTROUTING -s 172.17.0.0/16 -j MASQUERADE\nCOMMIT\n"
    )
    wanted = cluster(testbed)
    assert not testbed.bring(wanted)
    assert testbed.plane.read() == wanted
    assert "-m mark --mark 0x8000/0x8000 -j DROP" in testbed.rules("filter", "KUBE-FIREWALL")
    assert testbed.rules("filter", "DOCKER") == [SSH]
    assert testbed.rules("filter", "FORWARD")[-1] == "-j DOCKER"
    assert testbed.rules("nat", "POSTROUTING")[-1] == "-s 172.17.0.0/16 -j MASQUERADE"
    assert testbed.rules("nat", "CNI-HOSTPORT") == ["-j KUBE-MARK-MASQ"]
    assert testbed.iptables("-t nat -S KUBE-KUBELET-CANARY")


def test_reading_and_unrelated_changes_keep_the_generation(testbed: Testbed) -> None:
    assert not testbed.bring(cluster(testbed))
    before = testbed.plane.generation()
    testbed.plane.read()
    testbed.iptables("-t nat -L")
    if testbed.tool_backend is ToolBackend.NFT:  # in iptables-legacy this changes the same table
        testbed.iptables(f"-A INPUT {SSH}")
        testbed.iptables("-t nat -N DOCKER")
        subprocess.run(["nft", "add", "table", "ip", "others"], check=True, timeout=60)
    assert testbed.plane.generation() == before


def test_unchanged_rules_are_not_rewritten(testbed: Testbed) -> None:
    """The packet counters of unchanged rules are kept."""
    wanted = cluster(testbed)
    assert not testbed.bring(wanted)
    counted = "".join(f"-A {SVC} -c 7 700 {rule}\n" for rule in testbed.rules("nat", SVC))
    testbed.restore(f"*nat\n-F {SVC}\n{counted}COMMIT\n")
    more = testbed.wanted(testbed.plans(service("more", ips=("10.96.0.99",)), endpoints("more", "10.1.0.9")))
    assert not testbed.bring(wanted | more)
    assert testbed.iptables(f"-t nat -v -S {SVC}").count(" -c 7 700 ") == 3


def test_rules_are_counted_without_reading_them(testbed: Testbed) -> None:
    """The counts of changes add up to those of a read."""
    web = service("web", ips=("10.96.0.10",))
    testbed.bring(testbed.wanted())
    before = testbed.wanted()
    rules = [[each.rules for each in testbed.plane.counts()]]
    for number in (3, 1, 2, 0):
        slices = [endpoints("web", *(f"10.1.0.{each}" for each in range(1, number + 1)))]
        wanted = testbed.wanted(testbed.plans(web, *slices) if number else ())
        assert not testbed.plane.apply(diff(before, wanted))
        before = wanted
        rules.append([each.rules for each in testbed.plane.counts()])
    assert testbed.plane.read() == wanted
    assert [each.rules for each in testbed.plane.counts()] == rules[-1] == rules[0]


def test_a_reader_opens_the_tables_that_the_agent_has_written(testbed: Testbed) -> None:
    testbed.bring(testbed.wanted())
    reader = IptablesBackend(IptablesSettings(), testbed.tool_backend)
    with contextlib.closing(reader):
        reader.open_to_read()
        assert reader.read() == testbed.wanted()


@pytest.mark.parametrize("tool_backend", [ToolBackend.LEGACY])
def test_a_reader_creates_no_tables(tool_backend: ToolBackend) -> None:
    with netns.throw_away(), contextlib.closing(IptablesBackend(IptablesSettings(), tool_backend)) as reader:
        with pytest.raises(NotFound, match="no tables"):
            reader.open_to_read()
        assert not legacy.tables(Family.IPV4)
