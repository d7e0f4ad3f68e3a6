"""Services are planned again when programs start to listen, and each reason is logged once."""

import dataclasses
import logging

import pytest

from ebpfproxy.agent.protected_claims import NOT_PERMITTED, NOT_SERVED
from ebpfproxy.api.event import AddressesChanged, ApiServerReached, ListeningChanged, NodeChanged
from ebpfproxy.config.flag_types import parse_namespace_networks
from ebpfproxy.model.address import Address, Protocol, parse_address
from ebpfproxy.plan.protected_addresses import Protected
from ebpfproxy.plan.service_plan import Frontend
from tests.support.build import CONTEXT, networks, node, service
from tests.unit.agent.agent import LOCAL, Agent

NODE, REMOTE = "192.0.2.10", "203.0.113.1"
CLAIMING = service("web", ips=["10.96.0.1"], external=[NODE, REMOTE])


def listening(*addresses: str) -> ListeningChanged:
    found: frozenset[Address] = frozenset(map(parse_address, addresses))
    return ListeningChanged({(Protocol.TCP, 80): found} if found else {})


def served(agent: Agent) -> set[str]:
    known = {each: Frontend(parse_address(each), 80, Protocol.TCP) for each in (NODE, REMOTE)}
    return {text for text, frontend in known.items() if frontend in agent.kernel.frontends}


def test_a_frontend_follows_the_programs_of_the_node(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        agent.sync(CLAIMING, NodeChanged(node(addresses=[NODE])), LOCAL)
        assert served(agent) == {NODE, REMOTE}
        agent.sync(listening("0.0.0.0"))
        assert served(agent) == {REMOTE}
        agent.sync(listening("0.0.0.0", NODE))
        agent.sync(CLAIMING)
        assert [each.getMessage() for each in caplog.records] == [NOT_SERVED]
        agent.sync(listening())
        assert served(agent) == {NODE, REMOTE}
        agent.sync(listening("0.0.0.0"))
    assert [each.getMessage() for each in caplog.records] == [NOT_SERVED] * 2


def test_the_address_of_the_api_server_is_known_once_it_is_reached(agent: Agent) -> None:
    agent.sync(CLAIMING, LOCAL)
    agent.sync(ApiServerReached(parse_address(REMOTE), 6443))
    assert served(agent) == {NODE}


def test_a_change_that_concerns_no_claim_plans_no_service_again(agent: Agent) -> None:
    agent.sync(CLAIMING, LOCAL)
    agent.sync(listening("203.0.113.7"))
    assert agent.kernel.writes == []


def test_a_cluster_ip_follows_a_program_at_a_device_of_the_node(agent: Agent) -> None:
    """NodeLocal DNSCache. The plan depends on the addresses of the node, too."""
    frontend = Frontend(parse_address("10.96.0.1"), 80, Protocol.TCP)
    local = networks(["127.0.0.0/8", "10.96.0.1/32"])
    agent.sync(CLAIMING, LOCAL, listening("10.96.0.1"))
    assert frontend in agent.kernel.frontends
    agent.sync(AddressesChanged(frozenset(local)))
    assert frontend not in agent.kernel.frontends
    agent.sync(listening())
    assert frontend in agent.kernel.frontends
    agent.sync(listening("10.96.0.1"))
    assert frontend not in agent.kernel.frontends
    agent.sync(LOCAL)
    assert frontend in agent.kernel.frontends


def test_an_address_that_the_namespace_may_not_have_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    permitted = parse_namespace_networks(["*=192.0.2.0/24"])
    agent = Agent(context=dataclasses.replace(CONTEXT, external_networks=permitted))
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        for _ in range(2):
            agent.sync(CLAIMING, NodeChanged(node(addresses=[NODE])), LOCAL)
    assert served(agent) == {NODE}
    assert [each.getMessage() for each in caplog.records] == [NOT_PERMITTED]
    claims = agent.reconciler.protected_claims
    assert claims.count == 1
    frontend = Frontend(parse_address(REMOTE), 80, Protocol.TCP)
    assert claims.take_rejected() == [(CLAIMING.name, frontend, Protected.OUTSIDE_NETWORKS)]
    assert claims.take_rejected() == []
    agent.sync(service("web", ips=["10.96.0.1"], external=[NODE]))
    assert claims.count == 0
