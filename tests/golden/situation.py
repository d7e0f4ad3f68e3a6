"""One situation: a cluster and a node as YAML, taken through parse, tracker and plan as the agent does it."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ebpfproxy.api.event import (
    AddressesChanged,
    DevicesChanged,
    Event,
    Invalid,
    PodsBypass,
    ServiceChanged,
    SliceChanged,
)
from ebpfproxy.api.parse import parse_manifest_object
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.model.address import Network, parse_address, parse_network
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device import ETHERNET, Device
from ebpfproxy.plan.claims import Claims, LostClaim
from ebpfproxy.plan.devices import needs_packets_of_pods
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.node_plan import plan_node
from ebpfproxy.plan.service_plan import DetectLocal, NodePlan, PlanContext, ServicePortPlan, SocketLb
from tests.support.build import node_object

CASES = Path(__file__).parent / "cases"

_LOOPBACK = ["127.0.0.0/8", "::1/128"]

POD_CIDRS = ("10.1.0.0/16", "fd01::/64")
"""Where the endpoints of the cases are."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a renderer of expected texts may look at.

    `plans` are sorted; `lost` are the claims to frontends that another has; `refused` tells what parse
    left out, a line each.
    """

    name: str
    state: ClusterState
    context: PlanContext
    plans: tuple[ServicePortPlan, ...]
    node_plan: NodePlan
    lost: tuple[LostClaim, ...]
    refused: tuple[str, ...]


def situations() -> list[str]:
    """The names of all cases, sorted."""
    return sorted(folder.name for folder in CASES.iterdir() if (folder / "cluster.yaml").is_file())


def load(name: str) -> Situation:
    """Read ``cluster.yaml``, any objects of the API, and ``node.yaml`` of a case.

    The fields of node.yaml, all optional: ``name`` (here), ``labels`` and ``addresses`` of the Node,
    ``seen`` (true; false: our Node does not exist), ``pod_cidrs``: those of the Node, ``local``: networks
    of the kernel's local table beside loopback (the Node's addresses), ``options``: fields of PlanContext,
    CIDRs as text,
    ``devices``: fields of Device, the master by its name and before its parts; none is loopback or
    down unless it says so, and the first has index 1. ``bypassing``: names of devices.
    """
    folder = CASES / name
    node = yaml.safe_load((folder / "node.yaml").read_text()) or {}
    context = _context(node)
    events = [*_node_events(node, context), *_cluster_events(folder, context)]
    tracker = Tracker(started=0.0)
    for event in events:
        tracker.fold(event)
    return _planned(name, tracker.drain().state, context, tuple(_refused(events)))


def told_by_address(situation: Situation) -> Situation:
    """The same planned for a backend that does not know the devices of pods: those of `POD_CIDRS` are pods.

    As it is where its options tell pods in another way than by devices.
    """
    context = situation.context
    if context.detect_local is not DetectLocal.DEVICES:
        return situation
    cidrs = tuple(map(parse_network, POD_CIDRS))
    context = dataclasses.replace(context, detect_local=DetectLocal.CLUSTER_CIDR, cluster_cidrs=cidrs)
    return _planned(situation.name, situation.state, context, situation.refused)


def _planned(name: str, state: ClusterState, context: PlanContext, refused: tuple[str, ...]) -> Situation:
    claims = Claims()
    lost: set[LostClaim] = set()
    for service in sorted(state.services.values(), key=lambda service: service.name):
        slices = state.slices_of(service.name).values()
        settled = claims.update(service.name, plan_service(service, slices, state.node, context))
        lost.update(settled.lost)
    plans = sorted(claims.plans.values(), key=lambda plan: (plan.name, plan.family.value))
    node_plan = plan_node(state, context, any(map(needs_packets_of_pods, plans)))
    return Situation(name, state, context, tuple(plans), node_plan, tuple(sorted(lost)), refused)


def _context(node: dict[str, Any]) -> PlanContext:
    options = dict(node.get("options", {}))
    cidrs = tuple(parse_network(text) for text in options.pop("node_port_cidrs", ()))
    socket_lb = SocketLb(options.pop("socket_lb", "on"))
    patterns = tuple(options.pop("device_patterns", ()))
    detect_local = DetectLocal(options.pop("detect_local", "Devices"))
    cluster_cidrs = tuple(parse_network(text) for text in options.pop("cluster_cidrs", ()))
    return PlanContext(
        node.get("name", "here"),
        detect_local=detect_local,
        cluster_cidrs=cluster_cidrs,
        node_port_cidrs=cidrs,
        socket_lb=socket_lb,
        device_patterns=patterns,
        **options,
    )


def _node_events(node: dict[str, Any], context: PlanContext) -> Iterator[Event]:
    addresses = node.get("addresses", [])
    if node.get("seen", True):
        made = node_object(context.node_name, node.get("labels"), addresses)
        made["spec"]["podCIDRs"] = node.get("pod_cidrs", [])
        yield from parse_manifest_object(json.dumps(made).encode(), context.node_name)
    single = [f"{address}/{128 if ':' in address else 32}" for address in addresses]
    yield AddressesChanged(_networks(_LOOPBACK + node.get("local", single)))
    devices = _devices(node.get("devices", []))
    yield DevicesChanged(tuple(devices.values()))
    yield PodsBypass(frozenset(devices[name].ifindex for name in node.get("bypassing", ())))


def _devices(written: list[dict[str, Any]]) -> dict[str, Device]:
    devices: dict[str, Device] = {}
    for ifindex, fields in enumerate(written, 1):
        master = devices.get(fields.get("master", ""))
        devices[fields["name"]] = Device(
            ifindex,
            fields["name"],
            fields.get("kind", ""),
            fields.get("link_type", ETHERNET),
            fields.get("up", True),
            master.ifindex if master else 0,
            master.kind if master else "",
            tuple(map(parse_address, fields.get("addresses", ()))),
            fields.get("default_route", False),
        )
    return devices


def _networks(texts: list[str]) -> frozenset[Network]:
    return frozenset(parse_network(text) for text in texts)


def _cluster_events(folder: Path, context: PlanContext) -> Iterator[Event]:
    for document in yaml.safe_load_all((folder / "cluster.yaml").read_text()):
        yield from parse_manifest_object(json.dumps(document).encode(), context.node_name)


def _refused(events: list[Event]) -> Iterator[str]:
    for event in events:
        if isinstance(event, Invalid):
            yield f"{event.kind} {event.name}: {event.reason}"
        elif isinstance(event, ServiceChanged | SliceChanged):
            yield from (f"{event.name}: {complaint}" for complaint in event.complaints)
