"""The tracker: folds events into the cluster state and returns the changes since the last drain.

One thread uses the tracker. It does no I/O except log lines, and keeps the last good value of every object.
As in kube-proxy (servicechangetracker.go, endpointslicecache.go):

- changes that cancel each other out between two drains are no change;
- Services and EndpointSlices are added and deleted independently of each other;
- an update of fields that a proxy does not read is no change.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

from ebpfproxy.api.event import (
    ADDRESSES,
    DEVICES,
    ENDPOINT_SLICE,
    LISTENING,
    NAMESPACE,
    NODE,
    PEER_NODE,
    POD,
    SERVICE,
    SERVICE_CIDR,
    AddressesChanged,
    ApiServerReached,
    ChecksChanged,
    DevicesChanged,
    EndpointsFull,
    Event,
    Invalid,
    ListeningChanged,
    NamespaceChanged,
    NetworkNamespacesChanged,
    NodeChanged,
    PeerChanged,
    PodChanged,
    PodsBypass,
    ServiceChanged,
    ServiceCidrChanged,
    SliceChanged,
    Synced,
)
from ebpfproxy.api.shares import Shares
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family, Network
from ebpfproxy.model.cluster import ClusterState, Full
from ebpfproxy.model.device import Device
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node, PeerNode
from ebpfproxy.model.node_check import NodeCheck
from ebpfproxy.model.pod import Pod
from ebpfproxy.model.service import NamespacedName, Service
from ebpfproxy.plan.host_ports import name_of

log = Logger(__name__)

REJECTED = "Rejected an object"
"""The object cannot be served; `reason` says why. Its last good state stays. Logged once for each reason."""
REJECTED_PART = "Rejected a part of an object"
"""The rest of the object is served. Logged once for each reason."""

AWAITED = frozenset({SERVICE, ENDPOINT_SLICE, NODE, SERVICE_CIDR, ADDRESSES, DEVICES})
"""The kinds that a node must know completely before the first sync; see `Tracker` for others."""

_MAX_LOGGED_OBJECTS = 10_000
_MAX_LOGGED_TEXTS = 100
_PORT_SIZE = 20
"""A port takes as long to plan and to write as this number of endpoints."""


class Drained(NamedTuple):
    """The input of a sync: the cluster state and what changed since the last drain.

    - `state`: valid until the next event, which changes its mappings;
    - `services`: the Services whose plan may have changed, and the names of pods (`host_ports.name_of`).
      Among them are those with endpoints on a node whose check changed;
    - `node_changed`: this node's Node changed, which may change every plan;
    - `host_changed`: kernel state changed (local networks, devices, bypassing pods, listening sockets,
      network namespaces), the annotations of pods, or the networks of ClusterIPs, or the API server was
      reached at another address. The plan of the node depends on it, and which frontends are protected; the
      rest of the plans of Services does not;
    - `peers_changed`: `ClusterState.peers` changed, which may change the plans of Services with direct server
      return, that of the node, and what an edge checks;
    - `trigger_times`: for each slice change, the family of the slice, and the Unix time in seconds at which
      the cause happened;
    - `service_changes`, `slice_changes`: the number of events received, including those without effect;
    - `remaining`: changes were left for the next drain.
    """

    state: ClusterState
    services: frozenset[NamespacedName]
    node_changed: bool
    host_changed: bool
    peers_changed: bool
    trigger_times: tuple[tuple[Family, float], ...]
    service_changes: int
    slice_changes: int
    remaining: bool = False


class Tracker:
    """Folds events, in any order, into the state of the cluster.

    `started` is a Unix time in seconds. Trigger times before it are not reported, because after a start
    every slice looks changed (kubernetes PR 81360).

    - `node`: whether the Node of this machine is awaited, and ServiceCIDRs;
    - `peers`: whether all Nodes are awaited; if not, they are ignored;
    - `pods`, `namespaces`: whether they are awaited; Namespaces that are not are ignored;
    - `listening`: whether the listening sockets of this node are awaited.
    """

    def __init__(
        self,
        started: float,
        *,
        node: bool = True,
        peers: bool = False,
        pods: bool = False,
        namespaces: bool = False,
        listening: bool = False,
    ) -> None:
        self._started = started
        further = {
            NODE: node,
            SERVICE_CIDR: node,
            PEER_NODE: peers,
            POD: pods,
            NAMESPACE: namespaces,
            LISTENING: listening,
        }
        self._awaited = AWAITED - {NODE, SERVICE_CIDR} | {
            kind for kind, is_awaited in further.items() if is_awaited
        }
        self._services: dict[NamespacedName, Service] = {}
        self._slices: dict[NamespacedName, EndpointSlice] = {}
        self._by_service: dict[NamespacedName, tuple[EndpointSlice, ...]] = {}
        self._pods: dict[NamespacedName, Pod] = {}  # by `host_ports.name_of`
        self._opted_out: frozenset[Pod] = frozenset()
        self._namespaces_without_socket: set[str] = set()
        self._down: frozenset[NodeCheck] = frozenset()
        self._rechecked: set[str] = set()  # the nodes with changes of `_down` since the last drain
        self._full: Full = {}
        self._filled: set[NamespacedName] = set()  # the Services with changes of `_full` since the last drain
        self._views = MappingProxyType(self._services), MappingProxyType(self._by_service)
        self._peers: dict[str, PeerNode] = {}
        self._pods_view, self._peers_view = MappingProxyType(self._pods), MappingProxyType(self._peers)
        self._drained = ClusterState(*self._views)
        self._node = self._drained.node
        self._networks = self._drained.local_networks
        self._devices = self._drained.devices
        self._bypassing = self._drained.bypassing
        self._service_cidrs: dict[str, tuple[Network, ...]] = {}
        self._listening = self._drained.listening
        self._api_servers = self._drained.api_servers
        self._namespaces = self._drained.namespaces
        self._seen_to_bypass: set[int] = set()  # including devices that are not reported yet
        self._synced: set[str] = set()

        # Previous values of the objects that changed since the last drain.
        self._previous_services: dict[NamespacedName, Service | None] = {}
        self._previous_slices: dict[NamespacedName, EndpointSlice | None] = {}
        self._previous_pods: dict[NamespacedName, Pod | None] = {}
        self._previous_peers: dict[str, PeerNode | None] = {}
        self._trigger_times: dict[NamespacedName, list[tuple[Family, float]]] = {}
        self._received: Counter[str] = Counter()
        self._changed = Shares()  # what changed since the last drain
        self._moved: dict[NamespacedName, set[NamespacedName]] = {}  # changed slice: its Services
        self._changed_slices: dict[NamespacedName, set[NamespacedName]] = {}  # the reverse

        self._invalid: Counter[str] = Counter()
        self._logged = _LoggedTexts()

    @property
    def synced(self) -> bool:
        """Whether all AWAITED kinds are known completely."""
        return not self.lacking

    @property
    def lacking(self) -> frozenset[str]:
        """The AWAITED kinds that are not known completely yet."""
        return self._awaited - self._synced

    @property
    def pending(self) -> bool:
        """Whether a drain would return a change."""
        changed = self._previous_services or self._previous_slices or self._previous_pods
        of_others = self._previous_peers or self._rechecked or self._filled
        return bool(changed or of_others) or self._node_changed or self._host_changed

    @property
    def invalid(self) -> Mapping[str, int]:
        """The number of Invalid events, by kind."""
        return dict(self._invalid)

    def fold(self, event: Event) -> None:
        """Apply one event. Never raises."""
        match event:
            case ServiceChanged():
                self._fold_service(event)
            case SliceChanged():
                self._fold_slice(event)
            case PodChanged():
                self._fold_pod(event)
            case NamespaceChanged():
                self._fold_namespace(event)
            case NodeChanged(node):
                self._fold_node(node)
            case PeerChanged(name, peer):
                self._fold_peer(name, peer)
            case ServiceCidrChanged(name, cidrs, complaints):
                self._complain(SERVICE_CIDR, name, not cidrs, complaints)
                self._service_cidrs[name] = cidrs
            case ChecksChanged(down):
                self._rechecked |= {each.node for each in self._down ^ down}
                self._down = down
            case AddressesChanged(networks):
                # Compared once; later by identity. The local table of a large node has thousands of networks.
                previous = self._drained.local_networks
                self._networks = previous if networks == previous else networks
            case DevicesChanged(devices):
                self._fold_devices(devices)
            case ListeningChanged(listening):
                previous_listening = self._drained.listening
                self._listening = previous_listening if listening == previous_listening else listening
            case ApiServerReached(address, port):
                if (address, port) not in self._api_servers:
                    self._api_servers |= {(address, port)}
            case NetworkNamespacesChanged(namespaces):
                self._namespaces = namespaces
            case EndpointsFull():
                self._fold_full(event)
            case PodsBypass(ifindexes):
                self._seen_to_bypass |= ifindexes
                self._bypassing = self._ifindexes & self._seen_to_bypass
            case Synced(kind):
                self._synced.add(kind)
            case Invalid():
                self._invalid[event.kind] += 1
                if self._logged.is_new(event.kind, event.name, event.reason):
                    log.warning(REJECTED, kind=event.kind, name=event.name, reason=event.reason)

    def drain(self, most: float = math.inf, busy: Collection[str] = ()) -> Drained:
        """Return changes since the last drain; they are no longer pending.

        With `most`, only those of some Services, whose sizes (`_size`) add up to it at most, or of a single
        one. They are taken from `Shares`, none of the namespaces `busy`. A change of the Node may change all
        plans, so all are returned.
        """
        node_changed, host_changed = self._node_changed, self._host_changed  # before changes are removed
        if math.isinf(most) or node_changed:
            chosen = self._changed.take_all()
        else:
            chosen = self._with_joint(self._changed.take(self._size, most, busy))
        times: list[tuple[Family, float]] = []
        for name in chosen:
            times += self._trigger_times.pop(name, ())
            self._previous_services.pop(name, None)
            self._previous_pods.pop(name, None)
            for slice_name in self._changed_slices.pop(name, ()):
                self._moved.pop(slice_name, None)
                self._previous_slices.pop(slice_name, None)
        drained = Drained(
            state=self._state(),
            services=frozenset(chosen | self._services_on(self._rechecked) | self._filled),
            node_changed=node_changed,
            host_changed=host_changed,
            peers_changed=bool(self._previous_peers),
            trigger_times=tuple(times),
            service_changes=self._received[SERVICE],
            slice_changes=self._received[ENDPOINT_SLICE],
            remaining=bool(self._changed),
        )
        self._drained = drained.state
        self._previous_peers.clear()
        self._rechecked.clear()
        self._filled.clear()
        self._received.clear()
        return drained

    def _size(self, name: NamespacedName) -> int:
        """Return about how much there is to plan: endpoints of all ports, and ports."""
        service = self._services.get(name)
        endpoints = sum(len(each.endpoints) * len(each.ports) for each in self._by_service.get(name, ()))
        return endpoints + _PORT_SIZE * (len(service.ports) if service else 1)

    @property
    def _node_changed(self) -> bool:
        node, previous = self._node, self._drained.node
        return node is not previous and _plan_input(node) != _plan_input(previous)

    @property
    def _host_changed(self) -> bool:
        previous = self._drained
        if self._networks is not previous.local_networks or self._devices is not previous.devices:
            return True
        if self._listening is not previous.listening or self._api_servers is not previous.api_servers:
            return True
        if self._bypassing != previous.bypassing or self._namespaces != previous.namespaces:
            return True
        if self._opted_out != previous.opted_out:
            return True
        return self._networks_of_services != previous.service_cidrs

    @property
    def _networks_of_services(self) -> frozenset[Network]:
        return frozenset(itertools.chain.from_iterable(self._service_cidrs.values()))

    def _state(self) -> ClusterState:
        """Return the current state. Its mappings are not copied: that would cost the more, the larger the
        cluster is, for each change."""
        return ClusterState(
            *self._views,
            self._node,
            self._networks,
            self._devices,
            self._bypassing,
            self._pods_view,
            self._peers_view,
            self._down,
            self._networks_of_services,
            self._addresses_of_nodes(),
            self._listening,
            self._api_servers,
            self._namespaces,
            self._opted_out,
            self._full,
        )

    def _addresses_of_nodes(self) -> frozenset[Address]:
        if not self._previous_peers:
            return self._drained.node_addresses
        nodes = self._peers.values()
        return frozenset(address for each in nodes for address in (*each.addresses, *each.other_addresses))

    def _services_on(self, nodes: Set[str]) -> set[NamespacedName]:
        """Return the Services with endpoints on these nodes."""
        if not nodes:
            return set()
        return {
            name
            for name, slices in self._by_service.items()
            if any(state.node in nodes for each in slices for state in each.endpoints.states)
        }

    def _with_joint(self, chosen: set[NamespacedName]) -> set[NamespacedName]:
        """Add the Services between which slices moved, directly or not: that is one change."""
        added = list(chosen)
        while added:
            slices = self._changed_slices.get(added.pop(), ())
            joint = {each for name in slices for each in self._moved[name]} - chosen
            chosen |= joint
            added += joint
            for name in joint:
                self._changed.discard(name)
        return chosen

    def _note(self, name: NamespacedName) -> None:
        """Note whether the Service, or the pod with host ports, differs from the last drain."""
        if name in self._previous_services or name in self._previous_pods or name in self._changed_slices:
            self._changed.add(name)
        else:
            self._changed.discard(name)
            self._trigger_times.pop(name, None)

    def _note_slice(self, name: NamespacedName, services: set[NamespacedName]) -> None:
        """Note the previous and current Service of a changed slice; none if it is as at the last drain."""
        before = self._moved.pop(name, set())
        if services:
            self._moved[name] = services
        for each in before - services:
            self._changed_slices[each].discard(name)
            if not self._changed_slices[each]:
                del self._changed_slices[each]
        for each in services:
            self._changed_slices.setdefault(each, set()).add(name)
        for each in before | services:
            self._note(each)

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
        previous = self._previous_services.setdefault(event.name, old)
        if previous == new:
            del self._previous_services[event.name]
        self._note(event.name)

    def _fold_pod(self, event: PodChanged) -> None:
        self._complain(POD, event.name, event.pod is None, event.complaints)
        name = name_of(event.name)
        old = self._pods.get(name)
        if old == event.pod:
            return
        if event.pod is None:
            del self._pods[name]
        else:
            self._pods[name] = event.pod
        if _with_ports(self._previous_pods.setdefault(name, old)) == _with_ports(event.pod):
            del self._previous_pods[name]
        self._note(name)
        self._opted_out -= {old}
        if event.pod and self._is_opted_out(event.pod):
            self._opted_out |= {event.pod}

    def _fold_namespace(self, event: NamespaceChanged) -> None:
        if NAMESPACE not in self._awaited:
            return
        self._complain(NAMESPACE, event.name, event.socket_lb is None, event.complaints)
        if (event.name in self._namespaces_without_socket) is not (event.socket_lb is False):
            self._namespaces_without_socket ^= {event.name}
            self._opted_out = frozenset(filter(self._is_opted_out, self._pods.values()))

    def _is_opted_out(self, pod: Pod) -> bool:
        if pod.socket_lb is None:
            return pod.name.namespace in self._namespaces_without_socket
        return not pod.socket_lb

    def _fold_peer(self, name: str, peer: PeerNode | None) -> None:
        old = self._peers.get(name)
        if old == peer or PEER_NODE not in self._awaited:
            return
        if peer is None:
            del self._peers[name]
        else:
            self._peers[name] = peer
        if self._previous_peers.setdefault(name, old) == peer:
            del self._previous_peers[name]

    def _fold_full(self, event: EndpointsFull) -> None:
        key = event.service, event.family
        if self._full.get(key, frozenset()) == event.targets:
            return
        others = {each: targets for each, targets in self._full.items() if each != key}
        self._full = others | ({key: event.targets} if event.targets else {})
        self._filled.add(NamespacedName(event.service.namespace, event.service.name))

    def _fold_slice(self, event: SliceChanged) -> None:
        self._received[ENDPOINT_SLICE] += 1
        self._complain(ENDPOINT_SLICE, event.name, event.slice is None, event.complaints)
        old, new = self._slices.get(event.name), event.slice
        if _equal_for_plan(old, new):
            return
        stays = old is not None and new is not None and new.service == old.service
        if old is not None and not stays:
            self._remove_from_service(old)
            self._trigger_times.pop(old.service, None)
        if new is None:
            del self._slices[event.name]
        else:
            self._slices[event.name] = new
            of_service = self._by_service.get(new.service, ())
            added = (
                tuple(new if each is old else each for each in of_service) if stays else (*of_service, new)
            )
            self._by_service[new.service] = added
            if new.trigger_time is not None and new.trigger_time > self._started:
                self._trigger_times.setdefault(new.service, []).append((new.family, new.trigger_time))
        previous = self._previous_slices.setdefault(event.name, old)
        is_same = _equal_for_plan(previous, new)
        if is_same:
            del self._previous_slices[event.name]
        self._note_slice(event.name, set() if is_same else {each.service for each in (previous, new) if each})

    def _remove_from_service(self, removed: EndpointSlice) -> None:
        others = tuple(each for each in self._by_service[removed.service] if each is not removed)
        if others:
            self._by_service[removed.service] = others
        else:
            del self._by_service[removed.service]

    def _fold_node(self, reported: Node | None) -> None:
        """Apply a change of this node's Node.

        A Node that was deleted, or that registers again and has no status yet, keeps its addresses and pod
        CIDRs, because the kernel is the same. It loses its zone, as in kube-proxy's OnNodeDelete.
        """
        previous = self._node
        if previous is None:
            self._node = reported
            return
        current = reported or Node(previous.name)
        status = current if current.addresses or current.external_addresses else previous
        self._node = dataclasses.replace(
            current,
            addresses=status.addresses,
            external_addresses=status.external_addresses,
            pod_cidrs=current.pod_cidrs or previous.pod_cidrs,
        )

    def _fold_devices(self, devices: tuple[Device, ...]) -> None:
        previous = self._ifindexes
        reported, drained = tuple(sorted(devices, key=lambda each: each.ifindex)), self._drained.devices
        self._devices = drained if reported == drained else reported  # later by identity, as networks
        present = self._ifindexes
        self._seen_to_bypass -= previous - present  # the kernel may reuse the index for another device
        self._bypassing = present & self._seen_to_bypass

    @property
    def _ifindexes(self) -> frozenset[int]:
        return frozenset(each.ifindex for each in self._devices)

    def _complain(
        self, kind: str, name: NamespacedName | str, deleted: bool, complaints: tuple[str, ...]
    ) -> None:
        if deleted:
            self._logged.forget(kind, str(name))
        for complaint in complaints:
            if self._logged.is_new(kind, str(name), complaint):
                log.warning(REJECTED_PART, kind=kind, name=name, reason=complaint)


def _with_ports(pod: Pod | None) -> Pod | None:
    """Return the pod if it has host ports: no other one has plans."""
    return pod if pod and pod.host_ports else None


def _plan_input(node: Node | None) -> Node:
    """Return the Node without the fields that no plan depends on: name, load balancer eligibility and
    announcement."""
    return dataclasses.replace(node or Node(""), name="", eligible=True, dsr_port=0)


def _equal_for_plan(left: EndpointSlice | None, right: EndpointSlice | None) -> bool:
    """Whether both are equal apart from the trigger time, on which no plan depends."""
    if left is None or right is None:
        return left is right
    return (
        left.endpoints == right.endpoints
        and left.ports == right.ports
        and left.service == right.service
        and left.family is right.family
    )


class _LoggedTexts:
    """The texts that were logged for each object, so that each is logged once while the object exists.

    Bounded: of one object, at most 100 texts are logged. Above 10,000 objects, all texts are forgotten.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], set[str]] = {}

    def is_new(self, kind: str, name: str, text: str) -> bool:
        if len(self._texts) > _MAX_LOGGED_OBJECTS:
            self._texts.clear()
        texts = self._texts.setdefault((kind, name), set())
        if text in texts or len(texts) >= _MAX_LOGGED_TEXTS:
            return False
        texts.add(text)
        return True

    def forget(self, kind: str, name: str) -> None:
        self._texts.pop((kind, name), None)
