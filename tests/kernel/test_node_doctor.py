"""The report of `ebpfproxy doctor` about a node with two uplinks."""

import re

import pytest

from ebpfproxy.backends.firewall_checks import BEFORE_NAT, FORWARD
from ebpfproxy.diagnose.doctor.links import Page
from ebpfproxy.diagnose.doctor.other_proxies import LEFT_OVER, PROXY
from tests.kernel.cluster import Cluster
from tests.kernel.uplinks import LOOSE, STRICT, Uplinks

pytestmark = [pytest.mark.kernel, pytest.mark.ways("nftables")]

REQUESTS = "requests by eth1"


def doctor(uplinks: Uplinks) -> str:
    """Without bpf: otherwise the kernel verifies all programs, which takes a second."""
    lacking = ("setpriv", "--bounding-set=-bpf,-sys_admin")
    return uplinks.ebpfproxy("doctor", before=lacking, check=False).stdout


def state(text: str, feature: str) -> str:
    """The state in the feature's row, and the lines below it."""
    lines = r"(?:\n {15}\S.*)*"
    found = re.search(rf"^.*((?:present|missing) .*){feature}$({lines})", text, re.MULTILINE)
    assert found
    return " ".join(f"{found[1]} {found[2]}".split())


def test_a_strict_reverse_path_filter_is_reported_with_a_remedy(uplinks: Uplinks) -> None:
    with uplinks.reverse_path_filter(uplinks.node, STRICT):
        report = doctor(uplinks)
    assert state(report, REQUESTS) == (
        "missing (optional) the reverse path filter drops IPv4 clients whose replies leave by eth0 "
        "remedy: route these clients by eth1, or sysctl -w net.ipv4.conf.eth1.rp_filter=2 "
        f"see: {Page.UPLINKS.path}"
    )
    assert "requests by eth0" not in report
    assert "requests by veth" not in report


def test_a_loose_reverse_path_filter_accepts_all_uplinks(uplinks: Uplinks) -> None:
    with uplinks.reverse_path_filter(uplinks.node, LOOSE):
        assert state(doctor(uplinks), REQUESTS) == "present"


def test_a_strict_reverse_path_filter_accepts_equal_cost_routes(uplinks: Uplinks) -> None:
    """The route to a client uses one uplink at a time. The report names the other one as accepted."""
    with uplinks.reverse_path_filter(uplinks.node, STRICT), uplinks.multipath():
        report = doctor(uplinks)
    assert re.findall(r"(\w+) +requests by eth\d", report) == ["present"]


def test_a_running_agent_is_not_another_proxy(restartable: Cluster) -> None:
    restartable.mode = "nftables"
    restartable.launch(before=("env",)).await_sync()  # doctor reads the command line of a process
    report = restartable.ebpfproxy("doctor", check=False).stdout
    assert re.fullmatch(r"present an ebpfproxy agent runs: process \d+", state(report, PROXY))
    assert LEFT_OVER not in report
    assert "free port" not in report


def test_rules_of_others_that_differ_in_mode_ebpf_are_reported(uplinks: Uplinks) -> None:
    node, closing = uplinks.node, "PREROUTING -p tcp -m tcp --dport 30080 -j DROP"
    node.run(["iptables-nft", "-P", "FORWARD", "DROP"])
    node.run(f"iptables-nft -t raw -A {closing}".split())
    try:
        report = uplinks.ebpfproxy("doctor", "--proxy-mode=ebpf", check=False).stdout
    finally:
        node.run(["iptables-nft", "-P", "FORWARD", "ACCEPT"])
        node.run(f"iptables-nft -t raw -D {closing}".split())
    assert state(report, FORWARD) == (
        "missing (optional) iptables-nft: FORWARD drops connections from outside to endpoints "
        "remedy: accept the pods' CIDR: iptables-nft -I FORWARD -d CIDR -j ACCEPT, also with -s; or use "
        f"--proxy-mode=iptables see: {Page.FORWARD.path}"
    )
    found = state(report, BEFORE_NAT)
    assert found.startswith("missing (optional) mode ebpf translates before these rules see the packets: ")
    assert f"iptables-nft raw {closing.replace(' ', ': ', 1)} remedy: " in found
    assert found.endswith(f"see: {Page.FIREWALLS.path}")
