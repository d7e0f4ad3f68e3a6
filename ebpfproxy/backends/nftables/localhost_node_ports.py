"""What serves NodePorts on 127.0.0.1 and ::1, as in kube-proxy since 1.37 (KEP-6032). Pure.

A relay listens there for TCP. DNAT would need the sysctl route_localnet, which exposes the node's loopback
services to neighbors (CVE-2020-8558), and does not exist for IPv6. Rules reject and count packets of UDP and
SCTP.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import cast

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Entry,
    Key,
    Map,
    RelayEntry,
    RelayKey,
    nft_family,
)
from ebpfproxy.backends.userspace import rendering
from ebpfproxy.backends.userspace.entries import Listening, Local
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.model.address import Family, Protocol, format_address, loopback
from ebpfproxy.plan.service_plan import FrontendKind, FrontendPlan, ServicePortPlan

REJECTED_NODE_PORTS = "localhost-nodeports"
REJECTING_CHAINS = {
    each: f"localhost-nodeport-rejected-{each.name.lower()}" for each in (Protocol.UDP, Protocol.SCTP)
}
"""A chain for each protocol that is rejected, which counts its packets."""


def check_rule(family: Family) -> Rule:
    """Return the rule at input that looks up whether the packet is to be rejected."""
    address = format_address(loopback(family))
    return Rule(f"{nft_family(family)} daddr {address} meta l4proto . th dport vmap @{REJECTED_NODE_PORTS}")


def node_objects(family: Family) -> Iterator[tuple[Key, Entry]]:
    """Yield what all NodePorts share."""
    yield Map(family, REJECTED_NODE_PORTS), "type inet_proto . inet_service : verdict;"
    for chain in REJECTING_CHAINS.values():
        yield Chain(family, chain), ChainEntry("", (Rule("counter reject"),))


def service_objects(plan: ServicePortPlan) -> Iterator[tuple[Key, Entry]]:
    """Yield the entries of a plan: of TCP what a relay needs, of other protocols what rejects their packets.

    Empty without a NodePort. A TCP NodePort without endpoints has no listener, so the kernel rejects its
    connections.
    """
    node_ports = [each for each in plan.frontends if each.kind is FrontendKind.NODE_PORT]
    chain = REJECTING_CHAINS.get(plan.name.protocol)
    if not chain:
        yield from _relayed(plan, node_ports)
        return
    for each in node_ports:
        key = f"{plan.name.protocol.name.lower()} . {each.frontend.port}"
        yield Element(plan.family, REJECTED_NODE_PORTS, key), ElementEntry(f"goto {chain}")


def _relayed(
    plan: ServicePortPlan, node_ports: Iterable[FrontendPlan]
) -> Iterator[tuple[RelayKey, RelayEntry]]:
    """Yield the listeners and their endpoints.

    The listeners admit only the node, also if route_localnet lets packets of others reach loopback.
    """
    at_loopback = (
        each._replace(frontend=each.frontend._replace(address=loopback(plan.family))) for each in node_ports
    )
    relayed = dataclasses.replace(plan, frontends=tuple(at_loopback))
    for key, entry in rendering.render([relayed], None).items():
        if isinstance(entry, Listening):
            local = entry.node_local
            entry = entry._replace(pod_local=local, outside_local=local, pods=None, ranges=())
        if not isinstance(key, Local):
            yield key, entry


def split(delta: Delta[Key, Entry]) -> tuple[Delta[Key, Entry], Delta[RelayKey, RelayEntry]]:
    """Return what concerns the tables, and what concerns the relay."""
    of_relay = {key: cast(RelayEntry, each) for key, each in delta.puts.items() if isinstance(key, RelayKey)}
    dropped = frozenset(key for key in delta.drops if isinstance(key, RelayKey))
    of_tables = {key: each for key, each in delta.puts.items() if key not in of_relay}
    return Delta(of_tables, delta.drops - dropped), Delta(of_relay, dropped)
