"""A golden case, parsed, tracked and planned as the agent does it."""

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
from ebpfproxy.plan.devices import needs_packets_of_node, needs_packets_of_pods
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.node_plan import plan_node
from ebpfproxy.plan.service_plan import DetectLocal, NodePlan, PlanContext, ServicePortPlan, SocketLb
from tests.golden.case_file import parse_case, section_text
from tests.support.build import node_object

CASES = Path(__file__).parent / "cases"

_LOOPBACK = ["127.0.0.0/8", "::1/128"]

POD_CIDRS = ("10.1.0.0/16", "fd01::/64")
"""The networks of all endpoints in the cases."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """A case after planning: all that a renderer of expected texts may use.

    `plans` are sorted. `lost` has the claims to frontends that another ServicePort has. `rejected` has a line
    for each object or field that parsing rejected.
    """

    name: str
    state: ClusterState
    context: PlanContext
    plans: tuple[ServicePortPlan, ...]
    node_plan: NodePlan
    lost: tuple[LostClaim, ...]
    rejected: tuple[str, ...]
    counts_packets: bool = False


def situations() -> list[str]:
    """The names of all cases, sorted."""
    return sorted(path.stem for path in CASES.glob("*.txt"))


def path_of(name: str) -> Path:
    """The file of a case."""
    return CASES / f"{name}.txt"


def case_text(name: str) -> str:
    """The text of a case's file, line ends as they are."""
    return path_of(name).read_bytes().decode()


def load(name: str) -> Situation:
    """Parse, track and plan the sections ``cluster.yaml``, any objects of the API, and ``node.yaml``.

    CaseError if the file cannot be split into sections, or one of the two is missing.

    All fields of node.yaml are optional:

    - ``name``: of the Node; default ``here``.
    - ``seen``: whether the Node object is known; default true.
    - ``labels``, ``addresses``, ``pod_cidrs``: of the Node.
    - ``local``: the networks of the kernel's local table, without loopback; default: the Node's addresses.
    - ``options``: fields of PlanContext, with CIDRs as text.
    - ``devices``: fields of Device. The first has index 1. A device is up and Ethernet by default. ``master``
      is the name of an earlier device.
    - ``bypassing``: names of devices.
    - ``counts_packets``: whether kernel and iptables have nfacct; default false.
    """
    file = parse_case(case_text(name))
    node = yaml.safe_load(section_text(file, "node.yaml")) or {}
    context = _context(node)
    events = [*_node_events(node, context), *_cluster_events(section_text(file, "cluster.yaml"), context)]
    tracker = Tracker(started=0.0)
    for event in events:
        tracker.fold(event)
    planned = _planned(name, tracker.drain().state, context, tuple(_rejected(events)))
    return dataclasses.replace(planned, counts_packets=node.get("counts_packets", False))


def with_pods_detected_by_cidr(situation: Situation) -> Situation:
    """Plan for a backend that cannot detect pods by their devices: sources in `POD_CIDRS` are pods.

    Unchanged if the case's options detect pods by other means than devices.
    """
    context = situation.context
    if context.detect_local is not DetectLocal.DEVICES:
        return situation
    cidrs = tuple(map(parse_network, POD_CIDRS))
    context = dataclasses.replace(context, detect_local=DetectLocal.CLUSTER_CIDR, cluster_cidrs=cidrs)
    planned = _planned(situation.name, situation.state, context, situation.rejected)
    return dataclasses.replace(planned, counts_packets=situation.counts_packets)


def _planned(name: str, state: ClusterState, context: PlanContext, rejected: tuple[str, ...]) -> Situation:
    claims = Claims()
    lost: set[LostClaim] = set()
    for service in sorted(state.services.values(), key=lambda service: service.name):
        slices = state.slices_of(service.name)
        settled = claims.update(service.name, plan_service(service, slices, state.node, context))
        lost.update(settled.lost)
    plans = sorted(claims.plans.values(), key=lambda plan: (plan.name, plan.family.value))
    pods, of_node = any(map(needs_packets_of_pods, plans)), any(map(needs_packets_of_node, plans))
    node_plan = plan_node(state, context, pods, of_node=of_node)
    return Situation(name, state, context, tuple(plans), node_plan, tuple(sorted(lost)), rejected)


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


def _cluster_events(objects: str, context: PlanContext) -> Iterator[Event]:
    for document in yaml.safe_load_all(objects):
        yield from parse_manifest_object(json.dumps(document).encode(), context.node_name)


def _rejected(events: list[Event]) -> Iterator[str]:
    for event in events:
        if isinstance(event, Invalid):
            yield f"{event.kind} {event.name}: {event.reason}"
        elif isinstance(event, ServiceChanged | SliceChanged):
            yield from (f"{event.name}: {complaint}" for complaint in event.complaints)
