"""Events in, snapshots out: what has changed since the last drain, and what all of it is now.

The tracker belongs to one thread and does no I/O but its log lines. It holds the last good value of
every object. As in kube-proxy (servicechangetracker.go, endpointslicecache.go), changes that cancel
each other out between two drains were none, Services and EndpointSlices come and go independently
of each other, and an update that changes nothing a proxy reads is no change.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ebpfproxy.api.event import (
    ADDRESSES,
    DEVICES,
    ENDPOINT_SLICE,
    NODE,
    SERVICE,
    AddressesChanged,
    DevicesChanged,
    Event,
    Invalid,
    NodeChanged,
    PodsBypass,
    ServiceChanged,
    SliceChanged,
    Synced,
)
from ebpfproxy.log import Logger
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device import Device
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName, Service

log = Logger(__name__)

REJECTED = "Rejected an object"
"""It cannot be served, for the `reason` given. Logged once for each reason."""
REJECTED_PART = "Rejected a part of an object"
"""The rest is served. Logged once for each reason."""

AWAITED = frozenset({SERVICE, ENDPOINT_SLICE, NODE, ADDRESSES, DEVICES})
"""What must be synced before the first sync."""

_MAX_TOLD = 10_000
_MAX_TOLD_OF_ONE = 100


class Drained(NamedTuple):
    """What a sync starts from.

    `services`: those whose plan may have changed. `node_changed`: our Node did, so that any plan may have.
    `host_changed`: state of the kernel did (local networks, devices, which pods bypass), on which the plan
    of the node depends, and that of no Service. `trigger_times`: for each slice change, when its cause
    happened, in Unix seconds. `service_changes`, `slice_changes`: events received, those without effect
    included.
    """

    state: ClusterState
    services: frozenset[NamespacedName]
    node_changed: bool
    host_changed: bool
    trigger_times: tuple[float, ...]
    service_changes: int
    slice_changes: int


class Tracker:
    """Folds events, in any order, into the state of the cluster.

    `started` is a Unix time: changes whose cause is older are not reported as trigger times, since
    after a start every slice looks changed (kubernetes PR 81360).
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._services: dict[NamespacedName, Service] = {}
        self._slices: dict[NamespacedName, EndpointSlice] = {}
        self._by_service: dict[NamespacedName, dict[NamespacedName, EndpointSlice]] = {}
        self._drained = ClusterState({}, {})
        self._node = self._drained.node
        self._networks = self._drained.local_networks
        self._devices = self._drained.devices
        self._bypassing = self._drained.bypassing
        self._seen_to_bypass: set[int] = set()  # including devices that are not reported yet
        self._synced: set[str] = set()

        # The earlier values of what has changed since the last drain, and which inner mappings are new since.
        self._earlier_services: dict[NamespacedName, Service | None] = {}
        self._earlier_slices: dict[NamespacedName, EndpointSlice | None] = {}
        self._unshared: set[NamespacedName] = set()
        self._trigger_times: dict[NamespacedName, list[float]] = {}
        self._received: Counter[str] = Counter()

        self._invalid: Counter[str] = Counter()
        self._reported = _Reported()

    @property
    def synced(self) -> bool:
        """Whether all that is AWAITED is known in full."""
        return not self.lacking

    @property
    def lacking(self) -> frozenset[str]:
        """What of AWAITED is not known in full yet."""
        return AWAITED - self._synced

    @property
    def pending(self) -> bool:
        """Whether a drain would tell of a change."""
        changed = self._earlier_services or self._earlier_slices
        return bool(changed) or self._node_changed or self._host_changed

    @property
    def pending_services(self) -> int:
        """How many Services have changed since the last drain."""
        return len(self._earlier_services)

    @property
    def pending_slices(self) -> int:
        """How many EndpointSlices have changed since the last drain."""
        return len(self._earlier_slices)

    @property
    def invalid(self) -> Mapping[str, int]:
        """How many Invalid events there were, by kind."""
        return dict(self._invalid)

    def fold(self, event: Event) -> None:
        """Take in one event. Whatever it says, it never raises."""
        match event:
            case ServiceChanged():
                self._fold_service(event)
            case SliceChanged():
                self._fold_slice(event)
            case NodeChanged(node):
                self._fold_node(node)
            case AddressesChanged(networks):
                # By identity from here on: the local table of a large node has thousands of networks.
                earlier = self._drained.local_networks
                self._networks = earlier if networks == earlier else networks
            case DevicesChanged(devices):
                self._fold_devices(devices)
            case PodsBypass(ifindexes):
                self._seen_to_bypass |= ifindexes
                self._bypassing = self._ifindexes & self._seen_to_bypass
            case Synced(kind):
                self._synced.add(kind)
            case Invalid():
                self._invalid[event.kind] += 1
                if self._reported.is_new(event.kind, event.name, event.reason):
                    log.warning(REJECTED, kind=event.kind, name=event.name, reason=event.reason)

    def drain(self) -> Drained:
        """Hand over all changes since the last drain, which are then no longer pending."""
        touched = frozenset(name for pair in self._touched_slices() for name in pair if name)
        times = [t for name, many in self._trigger_times.items() if name in touched for t in many]
        drained = Drained(
            state=self._snapshot(),
            services=touched.union(self._earlier_services),
            node_changed=self._node_changed,
            host_changed=self._host_changed,
            trigger_times=tuple(times),
            service_changes=self._received[SERVICE],
            slice_changes=self._received[ENDPOINT_SLICE],
        )
        self._drained = drained.state
        for forgotten in self._earlier_services, self._earlier_slices, self._unshared, self._trigger_times:
            forgotten.clear()
        self._received.clear()
        return drained

    @property
    def _node_changed(self) -> bool:
        return _planned_by(self._node) != _planned_by(self._drained.node)

    @property
    def _host_changed(self) -> bool:
        earlier = self._drained
        if self._networks is not earlier.local_networks or self._devices is not earlier.devices:
            return True
        return self._bypassing != earlier.bypassing

    def _snapshot(self) -> ClusterState:
        """Copies of the outer mappings; an inner one is never changed once it was handed out."""
        earlier = self._drained
        return ClusterState(
            services=dict(self._services) if self._earlier_services else earlier.services,
            slices=dict(self._by_service) if self._unshared else earlier.slices,
            node=self._node,
            local_networks=self._networks,
            devices=self._devices,
            bypassing=self._bypassing,
        )

    def _touched_slices(self) -> list[tuple[NamespacedName | None, NamespacedName | None]]:
        """The Service before and after, of each changed slice: a slice may move to another."""
        pairs = ((old, self._slices.get(name)) for name, old in self._earlier_slices.items())
        return [(old.service if old else None, new.service if new else None) for old, new in pairs]

    def _fold_service(self, event: ServiceChanged) -> None:
        self._received[SERVICE] += 1
        self._complain(SERVICE, event.name, event.service is None, event.complaints)
        old, new = self._services.get(event.name), event.service
        if old == new:
            return
        if new is None:
            del self._services[event.name]
        else:
            self._services[event.name] = new
        earlier = self._earlier_services.setdefault(event.name, old)
        if earlier == new:
            del self._earlier_services[event.name]

    def _fold_slice(self, event: SliceChanged) -> None:
        self._received[ENDPOINT_SLICE] += 1
        self._complain(ENDPOINT_SLICE, event.name, event.slice is None, event.complaints)
        old, new = self._slices.get(event.name), event.slice
        if _serve_alike(old, new):
            return
        if old is not None and (new is None or new.service != old.service):
            self._slices_of(old.service).pop(event.name)
            if not self._by_service[old.service]:
                del self._by_service[old.service]
            self._trigger_times.pop(old.service, None)
        if new is None:
            del self._slices[event.name]
        else:
            self._slices[event.name] = self._slices_of(new.service)[event.name] = new
            if new.trigger_time is not None and new.trigger_time > self._started:
                self._trigger_times.setdefault(new.service, []).append(new.trigger_time)
        earlier = self._earlier_slices.setdefault(event.name, old)
        if _serve_alike(earlier, new):
            del self._earlier_slices[event.name]

    def _fold_node(self, reported: Node | None) -> None:
        """A Node that is gone, or that registers again and has not said so yet, keeps its addresses and its
        pods' networks, and loses its zone: the kernel below is the same one (kube-proxy's OnNodeDelete, too,
        forgets topology alone)."""
        previous = self._node
        if previous is None:
            self._node = reported
            return
        fresh = reported or Node(previous.name)
        status = fresh if fresh.addresses or fresh.external_addresses else previous
        self._node = dataclasses.replace(
            fresh,
            addresses=status.addresses,
            external_addresses=status.external_addresses,
            pod_cidrs=fresh.pod_cidrs or previous.pod_cidrs,
        )

    def _fold_devices(self, devices: tuple[Device, ...]) -> None:
        previous = self._ifindexes
        reported, earlier = tuple(sorted(devices, key=lambda each: each.ifindex)), self._drained.devices
        self._devices = earlier if reported == earlier else reported  # by identity from here on, as networks
        present = self._ifindexes
        self._seen_to_bypass -= previous - present  # another device may be given the index one day
        self._bypassing = present & self._seen_to_bypass

    @property
    def _ifindexes(self) -> frozenset[int]:
        return frozenset(each.ifindex for each in self._devices)

    def _slices_of(self, service: NamespacedName) -> dict[NamespacedName, EndpointSlice]:
        """The slices of a Service, for changing: copied first where a snapshot holds them."""
        if service not in self._unshared or service not in self._by_service:
            self._unshared.add(service)
            self._by_service[service] = dict(self._by_service.get(service, ()))
        return self._by_service[service]

    def _complain(self, kind: str, name: NamespacedName, gone: bool, complaints: tuple[str, ...]) -> None:
        if gone:
            self._reported.forget(kind, str(name))
        for complaint in complaints:
            if self._reported.is_new(kind, str(name), complaint):
                log.warning(REJECTED_PART, kind=kind, name=name, reason=complaint)


def _planned_by(node: Node | None) -> Node:
    """What plans depend on. Whether load balancers may send to the node is not among it, nor its name."""
    return dataclasses.replace(node or Node(""), name="", eligible=True)


def _serve_alike(one: EndpointSlice | None, other: EndpointSlice | None) -> bool:
    """Whether both are equal but for the trigger time, which no plan depends on."""
    if one is None or other is None:
        return one is other
    return (
        one.endpoints == other.endpoints
        and one.ports == other.ports
        and one.service == other.service
        and one.family is other.family
    )


class _Reported:
    """What was logged already, by object, so that each text is logged once as long as the object lives.

    Bounded: of one object a hundred texts, and when there are too many objects all are forgotten.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], set[str]] = {}

    def is_new(self, kind: str, name: str, text: str) -> bool:
        if len(self._texts) > _MAX_TOLD:
            self._texts.clear()
        texts = self._texts.setdefault((kind, name), set())
        if text in texts or len(texts) >= _MAX_TOLD_OF_ONE:
            return False
        texts.add(text)
        return True

    def forget(self, kind: str, name: str) -> None:
        self._texts.pop((kind, name), None)
