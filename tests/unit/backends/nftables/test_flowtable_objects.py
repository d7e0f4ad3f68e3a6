"""The flowtable: which frontends, chains and devices it has, and how it changes."""

import dataclasses

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.nftables.backend import render
from ebpfproxy.backends.nftables.changes import Change, Phase
from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    Entry,
    Flowtable,
    FlowtableDevice,
    Key,
    Set,
)
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.linux.nft.flowtables import DECLARATION
from ebpfproxy.linux.nft.messages import Kind, Table
from ebpfproxy.linux.nft.rule_expressions import SetNames
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.service_plan import NodePlan
from tests.golden.situation import load, with_pods_detected_by_cidr

V4, V6 = Family.IPV4, Family.IPV6
ON, OFF = NftablesSettings(flowtable=True), NftablesSettings()
LOCAL = frozenset(map(parse_network, ("192.0.2.10/32", "127.0.0.0/8", "2001:db8::10/128")))
NODE = NodePlan(LOCAL, LOCAL, flowtable_devices=((2, "eth0"), (7, "veth1")))


def kinds(entries: dict[Key, Entry]) -> set[str]:
    return {key.name for key in entries if isinstance(key, Chain | Set | Flowtable)}


def operations(before: dict[Key, Entry], after: dict[Key, Entry]) -> list[tuple[Kind, Key | None]]:
    delta = diff(before, after)
    of = [{k: e for k, e in each.items() if k.family is V4} for each in (delta.puts, before)]
    drops = [key for key in delta.drops if key.family is V4]
    change = Change(Table("ip", "kube-proxy"), of[0], drops, of[1], SetNames())
    assert not change.rejected
    return [(step.operation.kind, step.key) for step in change.steps(*Phase)]


def test_established_flows_of_frontends_are_added() -> None:
    entries = render((), NODE, ON)
    assert entries[Flowtable(V4, "services")] == entries[Flowtable(V6, "services")] == DECLARATION
    assert entries[FlowtableDevice(V4, "services", "eth0")] == 2
    assert entries[FlowtableDevice(V6, "services", "veth1")] == 7
    last, add = entries[Chain(V4, "filter-forward-last")], entries[Chain(V6, "flow-offload")]
    assert isinstance(last, ChainEntry)
    assert isinstance(add, ChainEntry)
    assert last.hook == "type filter hook forward priority 300; policy accept;"
    assert [each.text for each in last.rules] == ["ct state established ct status dnat jump flow-offload"]
    assert [each.text for each in add.rules] == [
        "ct original ip6 daddr @cluster-ips flow add @services",
        "ct original ip6 daddr . meta l4proto . ct original proto-dst @flow-ips flow add @services",
        "ct original ip6 daddr @nodeport-ips meta l4proto . ct original proto-dst @flow-nodeports "
        "flow add @services",
    ]


def test_the_addresses_of_node_ports_are_known_although_all_addresses_accept_them() -> None:
    entries = render((), NODE, ON)
    assert [key.key for key in entries if isinstance(key, Element) and key.container == "nodeport-ips"] == [
        "192.0.2.10",
        "2001:db8::10",
    ]


@pytest.mark.parametrize("case", ["load_balancer", "external_ip", "node_port", "no_endpoints"])
def test_frontends_besides_cluster_ips_are_elements(case: str) -> None:
    """An element in the maps of the NAT chains means that the Service has an endpoint."""
    situation = with_pods_detected_by_cidr(load(case))
    entries = render(situation.plans, situation.node_plan, ON)
    keys = [key for key in entries if isinstance(key, Element)]
    cluster_ips = {key.key for key in keys if key.container == "cluster-ips"}
    translated = {
        (key.family, key.key)
        for key in keys
        if key.container == "service-ips" and key.key.partition(" ")[0] not in cluster_ips
    }
    assert translated == {(key.family, key.key) for key in keys if key.container == "flow-ips"}
    ports = {(key.family, key.key) for key in keys if key.container == "service-nodeports"}
    assert ports == {(key.family, key.key) for key in keys if key.container == "flow-nodeports"}
    assert bool(translated or ports) is (case != "no_endpoints")


@pytest.mark.parametrize(
    ("node", "settings"), [(NODE, OFF), (dataclasses.replace(NODE, flowtable_devices=()), ON)]
)
def test_without_the_option_or_a_device_there_is_no_flowtable(
    node: NodePlan, settings: NftablesSettings
) -> None:
    entries = render((), node, settings)
    assert not kinds(entries) & {"filter-forward-last", "flow-offload"}
    assert not [key for key in entries if isinstance(key, Flowtable | FlowtableDevice)]
    assert ("flow-ips" in kinds(entries)) is settings.flowtable


def test_a_device_is_added_after_its_flowtable() -> None:
    found = operations({}, render((), NODE, ON))
    order = [key for kind, key in found if kind is Kind.NEW_FLOWTABLE]
    assert order == [
        Flowtable(V4, "services"),
        FlowtableDevice(V4, "services", "eth0"),
        FlowtableDevice(V4, "services", "veth1"),
    ]
    rules = [position for position, (kind, _) in enumerate(found) if kind is Kind.NEW_RULE]
    assert found.index((Kind.NEW_FLOWTABLE, order[0])) < rules[0]


def test_devices_come_and_go_without_other_changes() -> None:
    """The kernel has removed a device that is gone. A new one may have its name."""
    before, after = (
        render((), dataclasses.replace(NODE, flowtable_devices=devices), ON)
        for devices in (((2, "eth0"), (7, "veth1")), ((2, "eth0"), (9, "veth1"), (8, "veth2")))
    )
    again, new = FlowtableDevice(V4, "services", "veth1"), FlowtableDevice(V4, "services", "veth2")
    assert operations(before, after) == [(Kind.NEW_FLOWTABLE, again), (Kind.NEW_FLOWTABLE, new)]
    assert operations(after, before) == [(Kind.DELETE_FLOWTABLE, new), (Kind.NEW_FLOWTABLE, again)]


def test_a_flowtable_is_deleted_with_its_devices_after_the_rules() -> None:
    found = operations(render((), NODE, ON), render((), NODE, OFF))
    assert [key for kind, key in found if kind is Kind.DELETE_FLOWTABLE] == [Flowtable(V4, "services")]
    assert found[-1][0] in (Kind.DELETE_FLOWTABLE, Kind.DELETE_SET)
    flush = found.index((Kind.DELETE_RULE, Chain(V4, "flow-offload")))
    assert flush < found.index((Kind.DELETE_FLOWTABLE, Flowtable(V4, "services")))


def test_a_flowtable_of_another_form_is_recreated() -> None:
    after = render((), NODE, ON)
    before: dict[Key, Entry] = {
        key: entry for key, entry in after.items() if not isinstance(key, FlowtableDevice)
    }
    before[Flowtable(V4, "services")] = "other"
    found = [kind for kind, key in operations(before, after)]
    assert found == [Kind.DELETE_FLOWTABLE, *3 * [Kind.NEW_FLOWTABLE]]
