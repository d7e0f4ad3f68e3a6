"""Entries of backend userspace as text: addresses, and for each frontend its listener and its endpoints."""

from collections.abc import Iterator, Mapping

from ebpfproxy.backends.userspace.entries import (
    Balanced,
    Balancing,
    Entry,
    Key,
    Listen,
    Listening,
    Local,
    NodePorts,
)
from ebpfproxy.backends.userspace.rendering import render
from ebpfproxy.model.address import Address, format_address, format_endpoint
from ebpfproxy.plan.planned_endpoints import PlannedEndpoints
from tests.golden.situation import Situation, with_pods_detected_by_cidr


def userspace_text(situation: Situation) -> str:
    """A block for each kind of entry. Services are in the order of their names."""
    situation = with_pods_detected_by_cidr(situation)
    entries = render(situation.plans, situation.node_plan)
    blocks = (
        ("addresses", _addresses(entries)),
        ("listeners", _listeners(entries)),
        ("endpoints", _endpoints(entries)),
    )
    texts = ["\n".join([head, *shown]) for head, lines in blocks if (shown := list(lines))]
    return "\n\n".join(texts or ["nothing"]) + "\n"


def _addresses(entries: Mapping[Key, Entry]) -> Iterator[str]:
    for key, entry in entries.items():
        if isinstance(key, Local):
            yield f"  {format_address(key.address)}"
        elif isinstance(key, NodePorts) and isinstance(entry, tuple) and entry:
            shown = (format_address(Address(each)) for each in entry if isinstance(each, bytes))
            yield f"  NodePorts {', '.join(shown)}"


def _listeners(entries: Mapping[Key, Entry]) -> Iterator[str]:
    for key, entry in entries.items():
        if isinstance(key, Listen) and isinstance(entry, Listening):
            locals_ = zip(("pod", "node", "outside"), entry[2:5], strict=True)
            words = [f"{name} {'local' if is_local else 'cluster'}" for name, is_local in locals_]
            if entry.pods:
                words.append(f"pods {entry.pods.network or entry.pods.interface}")
            if entry.ranges is not None:
                words.append(f"only {' '.join(map(str, entry.ranges))}")
                words.append("node admitted" if entry.node_admitted else "node not admitted")
            yield f"  {key.frontend} to {entry.service.service}: {', '.join(words)}"


def _endpoints(entries: Mapping[Key, Entry]) -> Iterator[str]:
    for key, entry in entries.items():
        if isinstance(key, Balanced) and isinstance(entry, Balancing):
            affinity = f", affinity {entry.affinity_timeout} s" if entry.affinity_timeout else ""
            weights = f", weights {' '.join(map(str, entry.weights))}" if entry.weights else ""
            what = f"{key.service} {key.protocol.name} {key.family.value}"
            yield f"  {what}: {entry.algorithm}{weights}{affinity}"
            for each in PlannedEndpoints.packed(entry.rows):
                scopes = [name for name in ("cluster", "local") if getattr(each, name)]
                yield f"    {format_endpoint(each.address, each.port)} {' '.join(scopes)}".rstrip()
