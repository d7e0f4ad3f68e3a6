"""What is found of rules of other programs, as Docker, ufw, firewalld and administrators write them."""

import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends import firewall_checks
from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.firewall_checks import BEFORE_NAT, FORWARD
from ebpfproxy.config import Config
from ebpfproxy.linux.netns import netns

pytestmark = pytest.mark.kernel

PODS = "10.244.0.0/16"

DOCKER = """*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-CT - [0:0]
:DOCKER-ISOLATION-STAGE-1 - [0:0]
:DOCKER-ISOLATION-STAGE-2 - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-BRIDGE -o docker0 -j DOCKER
-A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -j DOCKER-CT
-A DOCKER-FORWARD -j DOCKER-ISOLATION-STAGE-1
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i docker0 -j ACCEPT
-A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
-A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
{more}COMMIT
"""
"""Docker 28 (iptables-save of a host with one published port)."""

UFW = """*filter
:FORWARD DROP [0:0]
:ufw-before-forward - [0:0]
:ufw-user-forward - [0:0]
:ufw-reject-forward - [0:0]
-A FORWARD -j ufw-before-forward
-A FORWARD -j ufw-reject-forward
-A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-forward -p icmp -m icmp --icmp-type 3 -j ACCEPT
-A ufw-before-forward -j ufw-user-forward
{more}COMMIT
"""

KUBE_PROXY = """-N KUBE-FORWARD
-I FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
"""

FIREWALLD = """table inet firewalld {
    chain filter_FORWARD {
        type filter hook forward priority filter + 10; policy accept;
        ct state { established, related } accept
        ct status dnat accept
        iifname "lo" accept
        ct state invalid drop
        jump filter_FORWARD_ZONES
        reject with icmpx admin-prohibited
    }
    chain filter_FORWARD_ZONES { }
}
"""
"""firewalld 2.1, without its zones."""


@pytest.fixture(autouse=True)
def _nowhere() -> Iterator[None]:
    """The calling thread is in a new network namespace with an uplink, eth0."""
    with netns.throw_away():
        for command in (
            "link add eth0 type veth peer name other",
            "link set eth0 up",
            "link set other up",
            "addr add 192.0.2.10/24 dev eth0",
            "route add default via 192.0.2.1",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield


def found(mode: str = "ebpf", *flags: str) -> dict[str, Finding]:
    config = Config(ebpf_redirect="redirect" in flags)
    return {each.feature: each for each in firewall_checks.probe(config, mode)}


def restore(text: str, tool: str = "iptables-nft", more: str = "") -> None:
    text = text.replace("{more}", more)
    subprocess.run([f"{tool}-restore", "--noflush"], input=text, text=True, check=True)


def nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)


def test_without_rules_of_others_nothing_is_found() -> None:
    assert found() == {each: Finding(each, needed=False) for each in (FORWARD, BEFORE_NAT)}
    assert [found(mode) for mode in ("iptables", "ipvs", "userspace")] == [{}, {}, {}]


@pytest.mark.parametrize("tool", ["iptables-legacy", "iptables-nft"])
@pytest.mark.parametrize("rules", [DOCKER, UFW], ids=["Docker", "ufw"])
def test_a_policy_of_forward_that_drops_connections_to_endpoints_is_found(rules: str, tool: str) -> None:
    restore(rules, tool, KUBE_PROXY)
    finding = found()[FORWARD]
    assert finding.missing == f"{tool}: FORWARD drops connections from outside to endpoints"
    assert f"{tool} -I FORWARD -d CIDR -j ACCEPT" in finding.remedy
    assert not finding.needed
    assert FORWARD not in found("ebpf", "redirect")


@pytest.mark.parametrize(
    "rule",
    [
        f"-A FORWARD -d {PODS} -j ACCEPT",  # flannel
        "-A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT",  # Calico
        "-I FORWARD -j ACCEPT",
        "-A FORWARD -o cni0 -j ACCEPT",
    ],
)
@pytest.mark.parametrize("rules", [DOCKER, UFW], ids=["Docker", "ufw"])
def test_nothing_is_found_if_a_rule_may_accept_connections_to_endpoints(rules: str, rule: str) -> None:
    restore(rules, more=f"{rule}\n")
    assert found()[FORWARD].present


@pytest.mark.parametrize(
    "rule",
    [
        "-A FORWARD -d 10.244.0.9/32 -j ACCEPT",
        "-A FORWARD -i wg0 -j ACCEPT",
        "-A FORWARD -i lo+ -j ACCEPT",
        f"-A FORWARD -p udp -d {PODS} -j ACCEPT",
        "-A FORWARD ! -i eth0 -j ACCEPT",
        f"-I FORWARD -i eth0 -j DROP\n-A FORWARD -d {PODS} -j ACCEPT",
        f"-N own\n-I FORWARD -j own\n-A own -i eth+ -j RETURN\n-A own -d {PODS} -j ACCEPT",
    ],
)
def test_rules_for_other_packets_do_not_accept_connections_to_endpoints(rule: str) -> None:
    restore(UFW, more=f"{rule}\n")
    assert not found()[FORWARD].present


def test_connections_that_mode_nftables_translates_are_accepted_by_rules_of_kube_proxy() -> None:
    restore(UFW)
    assert not found("nftables")[FORWARD].present
    restore("*filter\n{more}COMMIT\n", more=KUBE_PROXY)
    assert found("nftables")[FORWARD].present
    assert not found("ebpf")[FORWARD].present


def test_a_table_of_firewalld_is_found_in_mode_ebpf() -> None:
    nft(FIREWALLD)
    expected = "table inet firewalld, chain filter_FORWARD may drop connections from outside to endpoints"
    assert found()[FORWARD].missing == expected
    assert found("nftables")[FORWARD].present, "it accepts translated connections"


@pytest.mark.parametrize("family", ["ip", "inet", "ip6"])
def test_a_policy_of_a_native_chain_is_found_if_the_node_has_the_family(family: str) -> None:
    nft(f"table {family} own {{ chain f {{ type filter hook forward priority 0; policy drop; }}; }}")
    assert found()[FORWARD].present is (family == "ip6")


@pytest.mark.parametrize("tool", ["iptables-legacy", "iptables-nft"])
@pytest.mark.parametrize(
    "rule",
    [
        "-A PREROUTING -p tcp -m tcp --dport 30080 -j DROP",
        "-A PREROUTING -i eth0 -p udp -m udp --dport 30000:32767 -j DROP",
        "-A PREROUTING -p tcp -m multiport --dports 22,31000:31010 -j DROP",
        "-N closed\n-A PREROUTING -p tcp -m tcp --dport 30080 -j closed\n-A closed ! -s 10.0.0.0/8 -j DROP",
    ],
)
@pytest.mark.parametrize("table", ["raw", "mangle"])
def test_rules_before_nat_that_close_node_ports_are_found(table: str, rule: str, tool: str) -> None:
    restore(f"*{table}\n{rule}\nCOMMIT\n", tool)
    assert found()[BEFORE_NAT].missing == (
        f"mode ebpf translates before these rules see the packets: {tool} {table} "
        + rule.splitlines()[-1].removeprefix("-A ").replace(" ", ": ", 1)
    )
    assert found("nftables").keys() == {FORWARD}


@pytest.mark.parametrize(
    "rule",
    [
        "-A PREROUTING -p tcp -m tcp --dport 22 -j DROP",
        "-A PREROUTING -m rpfilter --invert -j DROP",
        "-A PREROUTING -p tcp -m tcp --dport 30080 -j ACCEPT",
        "-N closed\n-A PREROUTING -p tcp -m tcp --dport 22 -j closed\n-A closed -j DROP",
    ],
)
def test_other_rules_before_nat_are_no_finding(rule: str) -> None:
    restore(f"*raw\n{rule}\nCOMMIT\n")
    assert found()[BEFORE_NAT].present


@pytest.mark.parametrize(
    ("chain", "rule", "closes"),
    [
        ("hook prerouting priority raw;", "tcp dport 30080 drop", True),
        ("hook prerouting priority mangle;", "meta l4proto { tcp, udp } th dport 30000-32767 drop", True),
        ("hook prerouting priority mangle;", "udp dport != 53 udp dport >= 32000 drop", True),
        ("hook prerouting priority mangle; policy drop;", "tcp dport 22 accept", True),
        ("hook prerouting priority mangle;", "tcp dport 30080 jump closed", True),
        ("hook prerouting priority mangle;", "tcp dport 22 jump closed", False),
        ("hook prerouting priority mangle;", 'tcp dport 22 iifname "eth0" drop', False),
        ("hook prerouting priority raw;", "tcp dport 22 drop", False),
        ("hook prerouting priority raw;", "tcp dport 30080 accept", False),
        ("hook prerouting priority filter;", "tcp dport 30080 drop", False),
        ("hook ingress device eth0 priority 0;", "tcp dport 30080 drop", True),
        ("hook ingress device eth0 priority 0;", "tcp dport 22 drop", False),
    ],
)
def test_native_chains_before_nat_that_close_node_ports_are_found(
    chain: str, rule: str, closes: bool
) -> None:
    family = "netdev" if "ingress" in chain else "inet"
    nft(f"table {family} own {{ chain closed {{ drop; }}; chain early {{ type filter {chain}; {rule}; }}; }}")
    finding = found()[BEFORE_NAT]
    assert finding.present is not closes
    assert closes is (f"table {family} own, chain early" in finding.missing)
