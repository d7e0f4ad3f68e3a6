"""Removal of all state of mode iptables and of kube-proxy; detection of a node's iptables backend."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.iptables import cleanup, probes
from ebpfproxy.backends.iptables.entries import NAT, Chain, SharedChain
from ebpfproxy.backends.ipvs import cleanup as removal_of_ipvs
from ebpfproxy.linux import tools
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import iptables, legacy
from ebpfproxy.linux.xtables.iptables import ToolBackend
from ebpfproxy.model.address import Family
from tests.kernel.iptables_testbed import TOOL_BACKENDS, Testbed, empty_node, endpoints
from tests.support.build import service

pytestmark = pytest.mark.kernel

OTHER = {ToolBackend.LEGACY: ToolBackend.NFT, ToolBackend.NFT: ToolBackend.LEGACY}


@pytest.fixture(params=TOOL_BACKENDS)
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    with empty_node(request.param) as made:
        yield made


@pytest.fixture
def nowhere() -> Iterator[None]:
    """The calling thread is in a new network namespace."""
    with netns.throw_away():
        yield


def serve(testbed: Testbed, *names: str) -> None:
    plans = (
        testbed.plans(service(name, ips=(f"10.96.1.{i}",)), endpoints(name, f"10.1.1.{i}"))
        for i, name in enumerate(names, start=1)
    )
    assert not testbed.bring(testbed.wanted(*plans))


def restore(tool_backend: ToolBackend, text: str) -> None:
    iptables.find(Family.IPV4, tool_backend).restore(text)


def everything(*of: ToolBackend) -> str:
    """The output of iptables-save, without dates and counters."""
    tools = [tool for tool_backend in of or ToolBackend for tool in probes.installed()[tool_backend]]
    lines = (line for tool in tools for line in tool.save().splitlines())
    return "\n".join(line.partition(" [")[0] for line in lines if not line.startswith("#"))


def test_removal_deletes_only_the_modes_own_rules(testbed: Testbed) -> None:
    foreign = (
        "*filter\n:DOCKER - [0:0]\n:KUBE-FIREWALL - [0:0]\n"
        "-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n-A INPUT -j KUBE-FIREWALL\n-A OUTPUT -j KUBE-FIREWALL\n"
        "-A FORWARD -j DOCKER\n-A DOCKER -j RETURN\n"
        '-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet '
        'connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP\nCOMMIT\n'
        "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"
        "*nat\n:USER - [0:0]\n-A POSTROUTING -s 172.17.0.0/16 -j MASQUERADE\n-A PREROUTING -j USER\nCOMMIT\n"
    )
    testbed.restore(foreign)
    others = testbed.iptables("-S"), testbed.iptables("-t nat -S"), testbed.iptables("-t mangle -S")
    serve(testbed, "one", "two")
    assert testbed.iptables("-t nat -S") != others[1]
    assert cleanup.remove()
    assert (testbed.iptables("-S"), testbed.iptables("-t nat -S"), testbed.iptables("-t mangle -S")) == others
    assert cleanup.remove() == []


def test_a_dry_run_lists_what_removal_deletes(testbed: Testbed) -> None:
    serve(testbed, "one", "two")
    before = everything(testbed.tool_backend)
    listed = cleanup.remove(dry_run=True)
    assert everything(testbed.tool_backend) == before
    assert cleanup.remove() == listed
    assert f"iptables-{testbed.tool_backend} nat: chains of Services: 4" in listed
    assert f"ip6tables-{testbed.tool_backend} filter: chain KUBE-SERVICES" in listed
    assert sum("rule in PREROUTING: " in line for line in listed) == 2


def test_state_of_other_kube_proxy_versions_and_modes_is_removed(testbed: Testbed) -> None:
    testbed.restore(
        "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-XLB-AAAAAAAAAAAAAAAA - [0:0]\n:KUBE-LOAD-BALANCER - [0:0]\n"
        ":KUBE-MARK-MASQ - [0:0]\n:KUBE-NODE-PORT - [0:0]\n:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]\n"
        "-A PREROUTING -j KUBE-SERVICES\n-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n"
        "-A KUBE-SERVICES -j KUBE-LOAD-BALANCER\n-A KUBE-SERVICES -j KUBE-XLB-AAAAAAAAAAAAAAAA\n"
        "-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ\n-A KUBE-XLB-AAAAAAAAAAAAAAAA -j KUBE-SVC-AAAAAAAAAAAAAAAA\n"
        "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT\nCOMMIT\n"
        "*filter\n:KUBE-IPVS-FILTER - [0:0]\n:KUBE-NODE-PORT - [0:0]\n:KUBE-SOURCE-RANGES-FIREWALL - [0:0]\n"
        ":KUBE-PROXY-FIREWALL - [0:0]\n-A INPUT -j KUBE-IPVS-FILTER\n-A INPUT -j KUBE-NODE-PORT\n"
        "-A FORWARD -j KUBE-PROXY-FIREWALL\n-A KUBE-PROXY-FIREWALL -j KUBE-SOURCE-RANGES-FIREWALL\nCOMMIT\n"
    )
    cleanup.remove()
    removal_of_ipvs.remove(())
    assert "KUBE" not in everything(testbed.tool_backend)


def test_a_chain_with_a_foreign_jump_is_kept_with_the_chains_it_needs(testbed: Testbed) -> None:
    serve(testbed, "one")
    svc = next(line for line in testbed.iptables("-t nat -S").split() if line.startswith("KUBE-SVC-"))
    testbed.restore(f"*nat\n:CNI-SETMARK - [0:0]\n-A CNI-SETMARK -j {svc}\nCOMMIT\n")
    before = testbed.rules("nat", svc)
    cleanup.remove()
    assert testbed.rules("nat", svc) == before
    assert testbed.rules("nat", "KUBE-MARK-MASQ")
    assert "KUBE-SERVICES" not in testbed.iptables("-t nat -S")


def test_a_drain_keeps_one_rule_of_forward_until_the_last_connection_ends(testbed: Testbed) -> None:
    serve(testbed, "one", "two")
    translated = True
    removed, left = cleanup.drain(lambda of: translated)
    assert left
    assert f"iptables-{testbed.tool_backend} nat: chains of Services: 4" in removed
    saved = everything(testbed.tool_backend)
    assert set(re.findall("KUBE-[A-Z-]+", saved)) == {"KUBE-FIREWALL", "KUBE-FORWARD"}
    assert saved.count("-A KUBE-FORWARD") == 2, "one rule for each family"
    assert len(re.findall("^-A FORWARD .*-j KUBE-FORWARD$", saved, re.MULTILINE)) == 2
    assert cleanup.drain(lambda of: translated) == ([], True)
    assert everything(testbed.tool_backend) == saved
    translated = False
    removed, left = cleanup.drain(lambda of: translated)
    lines_of_both = ["KUBE-FORWARD"] * 4  # the jump and the chain
    assert ([line.rpartition(" ")[2] for line in removed], left) == (lines_of_both, False)
    assert "KUBE-FORWARD" not in everything()
    assert cleanup.drain(lambda of: translated) == ([], False)


def test_a_drain_of_mode_ipvs_removes_the_conntrack_rule_with_the_last_connection(testbed: Testbed) -> None:
    """The rule is in a chain that other modes also use, next to foreign rules."""
    testbed.restore(
        "*filter\n:KUBE-IPVS-FILTER - [0:0]\n-A INPUT -j KUBE-IPVS-FILTER\nCOMMIT\n"
        "*nat\n:KUBE-LOAD-BALANCER - [0:0]\nCOMMIT\n"
    )
    assert removal_of_ipvs.drain((), lambda of: True)[1]
    assert cleanup.drain(lambda of: True) == ([], True)
    assert set(re.findall("KUBE-[A-Z-]+", everything(testbed.tool_backend))) == {"KUBE-FORWARD"}
    assert removal_of_ipvs.drain((), lambda of: True) == ([], True)
    removed, left = removal_of_ipvs.drain((), lambda of: False)
    assert ([line.rpartition(" ")[2] for line in removed], left) == (["KUBE-FORWARD"], False)
    assert "KUBE-FORWARD" not in everything()
    assert removal_of_ipvs.drain((), lambda of: False) == ([], False)


def test_draining_mode_ipvs_keeps_the_rules_of_active_mode_iptables(testbed: Testbed) -> None:
    serve(testbed, "one")
    before = everything()
    assert removal_of_ipvs.drain((), lambda of: True) == ([], False)
    assert everything() == before


def test_active_mode_iptables_needs_no_extra_conntrack_rule(testbed: Testbed) -> None:
    """Its own KUBE-FORWARD already matches on conntrack state, and is kept."""
    serve(testbed, "one")
    before = everything()
    testbed.restore("*filter\n:KUBE-IPVS-FILTER - [0:0]\n-A INPUT -j KUBE-IPVS-FILTER\nCOMMIT\n")
    removed, left = removal_of_ipvs.drain((), lambda of: True)
    assert ([line.rpartition(" ")[2] for line in removed], left) == (["KUBE-IPVS-FILTER"] * 2, False)
    assert everything() == before


def test_each_family_is_drained_separately(testbed: Testbed) -> None:
    serve(testbed, "one")
    assert cleanup.drain(lambda of: of is Family.IPV6)[1]
    assert "KUBE-FORWARD" not in testbed.iptables("-S")
    assert "KUBE-FORWARD" in everything(testbed.tool_backend)


def test_mode_iptables_can_start_again_during_its_drain(testbed: Testbed) -> None:
    serve(testbed, "one")
    before = everything(testbed.tool_backend).splitlines()
    cleanup.drain(lambda of: True)
    serve(testbed, "one")
    assert sorted(everything(testbed.tool_backend).splitlines()) == sorted(before)


def test_more_chains_than_fit_in_one_batch_are_removed(testbed: Testbed) -> None:
    serve(testbed, *(f"service-{number}" for number in range(250)))
    cleanup.remove()
    assert "KUBE-S" not in everything(testbed.tool_backend)


@pytest.mark.usefixtures("nowhere")
def test_removal_without_state_deletes_and_creates_nothing() -> None:
    assert cleanup.remove() == []
    assert not any(legacy.tables(family) for family in Family)
    assert subprocess.run(["nft", "list", "tables"], capture_output=True, check=True).stdout == b""


@pytest.mark.usefixtures("nowhere")
def test_removal_without_tools_deletes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tools, "FOLDERS", str(tmp_path))
    assert cleanup.remove() == []


def test_rules_of_the_other_tool_backend_are_removed_after_the_sync(testbed: Testbed) -> None:
    """Otherwise both would translate, and the first one would take precedence."""
    other = OTHER[testbed.tool_backend]
    with_other = Testbed(other, testbed.node, testbed.context)
    serve(with_other, "one")
    with_other.plane.close()
    before = everything(other)
    assert "KUBE-SERVICES" in before
    run = testbed.another_run()
    assert everything(other) == before
    assert not run.apply(diff(run.read(), testbed.wanted()))
    run.close()
    assert "KUBE-SERVICES" not in everything(other)
    assert Chain(Family.IPV4, NAT, "KUBE-MARK-MASQ") in testbed.plane.read()
    assert SharedChain(Family.IPV4, NAT, "KUBE-SERVICES") in testbed.plane.read()


# Detection of the backend


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("hint", ["KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY", "KUBE-PROXY-CANARY"])
@pytest.mark.parametrize("tool_backend", ToolBackend)
def test_a_hint_chain_takes_precedence_over_the_number_of_rules(tool_backend: ToolBackend, hint: str) -> None:
    restore(OTHER[tool_backend], "*filter\n-A INPUT -p tcp -j ACCEPT\n-A INPUT -p udp -j ACCEPT\nCOMMIT\n")
    restore(tool_backend, f"*mangle\n:{hint} - [0:0]\nCOMMIT\n")
    assert probes.choose(probes.AUTO) is tool_backend


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("tool_backend", ToolBackend)
def test_the_kubelets_hint_takes_precedence_over_a_proxys(tool_backend: ToolBackend) -> None:
    restore(OTHER[tool_backend], "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n")
    restore(tool_backend, "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n")
    assert probes.choose(probes.AUTO) is tool_backend


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("tool_backend", ToolBackend)
def test_without_a_hint_the_tool_backend_with_more_rules_is_used(tool_backend: ToolBackend) -> None:
    restore(OTHER[tool_backend], "*filter\n-A INPUT -p tcp -j ACCEPT\nCOMMIT\n")
    restore(tool_backend, "*nat\n-A OUTPUT -p tcp -j ACCEPT\n-A OUTPUT -p udp -j ACCEPT\nCOMMIT\n")
    assert probes.choose(probes.AUTO) is tool_backend


@pytest.mark.usefixtures("nowhere")
def test_without_rules_the_default_iptables_is_used_and_no_table_created() -> None:
    assert probes.choose(probes.AUTO) is iptables.plain_tool_backend(Family.IPV4)
    assert not any(legacy.tables(family) for family in Family)
    assert subprocess.run(["nft", "list", "tables"], capture_output=True, check=True).stdout == b""


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("tool_backend", ToolBackend)
def test_the_requested_tool_backend_is_used(tool_backend: ToolBackend) -> None:
    assert probes.choose(str(tool_backend)) is tool_backend


# Features of this machine


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("tool_backend", [probes.AUTO, *ToolBackend])
def test_probes_succeed_on_this_machine_and_leave_nothing_behind(tool_backend: str) -> None:
    found = probes.probe(tool_backend)
    assert len(found) > 20
    assert [str(finding) for finding in found if not finding.present] == []
    assert not any(legacy.tables(family) for family in Family)
    assert subprocess.run(["nft", "list", "tables"], capture_output=True, check=True).stdout == b""
