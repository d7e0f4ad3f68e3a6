"""Conntrack entries of real flows, in separate network namespaces."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.netfilter import sysctls
from ebpfproxy.backends.netfilter.sysctls import NetfilterSettings, Sysctl
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.model.address import Family, parse_address
from tests.kernel.nat_testbed import DNS, PATIENCE, TARGET, UDP, Testbed, answers, end_all_flows
from tests.support.confined import as_nobody

pytestmark = pytest.mark.kernel


@pytest.fixture(params=list(Family), ids=lambda of: of.value)
def testbed(request: pytest.FixtureRequest, testbeds: dict[Family, Testbed]) -> Iterator[Testbed]:
    testbed_of_family = testbeds[request.param]
    testbed_of_family.rules()
    yield testbed_of_family
    end_all_flows(testbed_of_family)


def test_a_flow_has_the_addresses_of_both_directions(testbed: Testbed) -> None:
    testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[0]))
    with testbed.pod(0) as server, testbed.client_socket(testbed.client, testbed.at.vip) as client:
        answers(client, server)
        (flow,) = testbed.flows()
        own = parse_address(testbed.at.client), client.getsockname()[1]
    assert flow[:5] == (UDP, *own, parse_address(testbed.at.vip), DNS)
    assert flow[5:9] == (parse_address(testbed.at.pods[0]), TARGET, *own)
    assert (flow.is_dnated, flow.is_snated) == (True, False)
    assert (flow.zone, flow.reply_zone, flow.mark) == (0, 0, 0)


@pytest.mark.parametrize("direction", ["", "original", "reply"])
def test_a_flow_with_zones_per_direction_is_read_and_deleted(testbed: Testbed, direction: str) -> None:
    with (
        testbed.pod(0) as server,
        testbed.client_socket(testbed.client, testbed.at.pods[0], TARGET) as client,
    ):
        own = client.getsockname()[1]
        testbed.nft(
            f"table {testbed.at.nft} ebpfproxy-zones {{\n"
            "chain pre { type filter hook prerouting priority -300;\n"
            f"udp dport {TARGET} ct {direction} zone set 7\n"
            f"udp sport {TARGET} ct {direction} zone set 7\n}}\n"
            "chain post { type filter hook postrouting priority 0;\n"
            f"udp dport {TARGET} ct mark set 0x55\n}}\n}}\n"
        )
        try:
            client.send(b"?")
            server.recvfrom(16)
            (flow,) = testbed.flows()
        finally:
            testbed.nft(f"delete table {testbed.at.nft} ebpfproxy-zones")
    assert (flow.source_port, flow.mark) == (own, 0x55)
    assert (flow.zone, flow.reply_zone) == {"": (7, 7), "original": (7, 0), "reply": (0, 7)}[direction]
    with testbed.node.entered():
        assert conntrack.delete(flow) is True
        assert conntrack.delete(flow) is False
    assert testbed.flows() == []


def test_deleting_an_old_flow_keeps_the_clients_new_flow(
    testbed: Testbed,
) -> None:
    testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[0]))
    with testbed.pod(0), testbed.pod(1), testbed.client_socket(testbed.client, testbed.at.vip) as client:
        client.send(b"?")
        (old,) = testbed.flows()
        testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[1]))
        with testbed.node.entered():
            assert conntrack.delete(old) is True
            client.send(b"?")
            assert conntrack.delete(old) is False
        (new,) = testbed.flows()
    assert new.reply_source == parse_address(testbed.at.pods[1])


def test_nat_in_use_is_true_while_a_flow_is_translated(testbed: Testbed) -> None:
    testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[0]))
    other = next(of for of in Family if of is not testbed.at.family)
    with (
        testbed.pod(0) as server,
        testbed.client_socket(testbed.client, testbed.at.pods[0], TARGET) as plain,
        testbed.client_socket(testbed.client, testbed.at.vip) as client,
        testbed.node.entered(),
    ):
        answers(plain, server)
        assert conntrack.nat_in_use() is False
        answers(client, server)
        assert conntrack.nat_in_use() is True
        assert conntrack.nat_in_use(testbed.at.family) is True
        assert conntrack.nat_in_use(other) is False
        (flow,) = [flow for flow in conntrack.flows(UDP) if flow.is_dnated]
        conntrack.delete(flow)
        assert conntrack.nat_in_use() is False


def test_flows_stay_translated_without_nat_rules_only_if_a_rule_matches_on_state(
    testbed: Testbed,
) -> None:
    """The reason for `nat_in_use`: without a rule that matches on state, the kernel stops tracking
    packets."""
    testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[0]))
    with testbed.pod(0) as server, testbed.client_socket(testbed.client, testbed.at.vip) as client:
        answers(client, server)
        testbed.rules(track=True)
        answers(client, server)
        testbed.rules(track=False)
        client.send(b"lost")
        testbed.rules(track=True)
        answers(client, server)  # the server's first datagram is not the lost one


_AS_NOBODY = """
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.model.address import Protocol
try:
    list(conntrack.flows(Protocol.UDP))
except Unsupported as failure:
    print(failure.hint)
"""


def test_without_net_admin_the_hint_names_the_capability() -> None:
    done = subprocess.run(
        [*as_nobody(), sys.executable, "-c", _AS_NOBODY],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert "CAP_NET_ADMIN" in done.stdout


def test_sysctls_of_the_namespace_are_set_and_read_only_ones_logged_as_warnings(
    testbed: Testbed, caplog: pytest.LogCaptureFixture
) -> None:
    established = "net/netfilter/nf_conntrack_tcp_timeout_established"
    size = "net/netfilter/nf_conntrack_max"
    with testbed.node.entered():
        if (sysctl.ROOT / size).stat().st_mode & 0o222:
            pytest.skip("this kernel lets a namespace set the machine's limit")
        sysctl.ensure(established, "432000")
        wish = sysctls.desired_sysctls(NetfilterSettings(max_per_core=0), 2)
        sysctls.apply([Sysctl(size, 1 << 30, at_least=True), *wish])
        assert sysctl.read(established) == "86400"
    (warning,) = [record.__dict__["values"] for record in caplog.records if record.levelname == "WARNING"]
    assert (warning["file"], warning["value"], warning["errno"]) == (
        f"/proc/sys/{size}",
        1 << 30,
        "EACCES",
    )
