"""The entries of NodePorts on 127.0.0.1 and ::1."""

import dataclasses

import pytest

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.nftables.backend import render
from ebpfproxy.backends.nftables.entries import Element, ElementEntry, Entry, Key, RelayKey
from ebpfproxy.backends.nftables.localhost_node_ports import split
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.backends.userspace.entries import Balanced, Balancing, Listen, Listening
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.plan.service_plan import NoEndpointAction, ServicePortPlan
from tests.unit.backends.nftables.test_service_objects import BALANCER, CLUSTER_IP, LOCAL, NODE_PORT, PLAN

SETTINGS = NftablesSettings(localhost=frozenset({Family.IPV4}))


def added(plan: ServicePortPlan) -> dict[Key, Entry]:
    """What mode nftables has for the plan only because it serves loopback."""
    usual = render((plan,), None, NftablesSettings())
    with_loopback = render((plan,), None, SETTINGS)
    assert usual.items() <= with_loopback.items()
    return {key: entry for key, entry in with_loopback.items() if key not in usual}


def test_a_tcp_node_port_has_a_listener_at_loopback_that_admits_only_the_node() -> None:
    plan = dataclasses.replace(PLAN, affinity_timeout=60)
    (service, balancing), (key, entry) = added(plan).items()
    assert (str(service), str(key)) == (
        "endpoints of default/web:http TCP IPv4",
        "listener 127.0.0.1:30080/TCP",
    )
    assert balancing == Balancing(plan.endpoints.rows, 60)
    assert isinstance(service, Balanced)
    assert entry == Listening(service, 30080, False, False, False, None, ())


def test_the_listener_has_the_scope_of_the_node() -> None:
    plan = dataclasses.replace(PLAN, frontends=(NODE_PORT._replace(node=LOCAL),))
    entry = next(each for each in added(plan).values() if isinstance(each, Listening))
    assert (entry.pod_local, entry.node_local, entry.outside_local) == (True, True, True)


@pytest.mark.parametrize(
    "change",
    [
        {"no_endpoint_action": NoEndpointAction.REJECT},
        {"family": Family.IPV6},
        {"frontends": (CLUSTER_IP, BALANCER)},
    ],
    ids=["no endpoints", "family without loopback", "no NodePort"],
)
def test_otherwise_nothing_is_added(change: dict[str, object]) -> None:
    assert added(dataclasses.replace(PLAN, **change)) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", [Protocol.UDP, Protocol.SCTP])
@pytest.mark.parametrize("action", NoEndpointAction)
def test_a_node_port_of_another_protocol_is_rejected(protocol: Protocol, action: NoEndpointAction) -> None:
    plan = dataclasses.replace(PLAN, name=PLAN.name._replace(protocol=protocol), no_endpoint_action=action)
    name = protocol.name.lower()
    assert added(plan) == {
        Element(Family.IPV4, "localhost-nodeports", f"{name} . 30080"): ElementEntry(
            f"goto localhost-nodeport-rejected-{name}"
        )
    }


def test_a_delta_is_split_into_that_of_the_tables_and_that_of_the_relay() -> None:
    entries = render((PLAN,), None, SETTINGS)
    of_tables, of_relay = split(Delta(entries, frozenset(entries)))
    assert {type(key) for key in of_relay.puts} == {Balanced, Listen}
    assert of_tables.puts == render((PLAN,), None, NftablesSettings())
    assert (of_tables.drops, of_relay.drops) == (frozenset(of_tables.puts), frozenset(of_relay.puts))
    assert not any(isinstance(key, RelayKey) for key in of_tables.puts)
