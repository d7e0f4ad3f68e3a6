"""Reads the state of the cluster once, as an agent with the same configuration does."""

import dataclasses
import queue
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ebpfproxy.agent.inbox import Died, Inbox, Received
from ebpfproxy.agent.sources import Sources, tracker_for
from ebpfproxy.api.event import (
    DISPENSABLE,
    ENDPOINT_SLICE,
    POD,
    SERVICE,
    Event,
    Invalid,
    PodChanged,
    ServiceChanged,
    SliceChanged,
    Unserved,
)
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.config import Config
from ebpfproxy.errors import EbpfProxyError, Rejected
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.model.address import Network
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.node_ports import LOOPBACK

NODE_SECONDS = 3.0
"""How long a Node object is awaited after everything else is known. Without it, zone and pod CIDRs are
unknown."""


class Complaint(NamedTuple):
    """An object, or a part of it if `partly`, that cannot be served. `kind`: for example "Service"."""

    kind: str
    name: str
    reason: str
    partly: bool


class Cluster(NamedTuple):
    """The state of the cluster, and the objects that cannot be served, in the order in which they came.

    `state.node` is None if the Node object cannot be read. `unserved` are the Services that no service proxy
    serves, and why.
    """

    state: ClusterState
    complaints: tuple[Complaint, ...]
    unserved: Mapping[NamespacedName, Unserved] = MappingProxyType({})


def read_cluster(config: Config, timeout: float = 30.0) -> Cluster:
    """Read Services, EndpointSlices and the Node, and this machine's addresses and devices.

    The source is that of the configuration: the API server or `--manifests`. Raises EbpfProxyError if it
    cannot be read, or not within `timeout` seconds.
    """
    inbox: Inbox = queue.SimpleQueue()
    sources = Sources(dataclasses.replace(config, config=None), inbox, Metrics(), None)
    sources.start()
    try:
        return _fold(inbox, time.monotonic() + timeout, tracker_for(config))
    finally:
        sources.stop()


def without_machine(cluster: Cluster) -> Cluster:
    """Replace this machine's addresses and devices by the addresses of the Node object."""
    node = cluster.state.node
    addresses = (*node.addresses, *node.external_addresses) if node else ()
    networks = frozenset((*LOOPBACK, *(Network(address, 128) for address in addresses)))
    return cluster._replace(state=dataclasses.replace(cluster.state, local_networks=networks, devices=()))


def _fold(inbox: Inbox, deadline: float, tracker: Tracker) -> Cluster:
    complaints: dict[Complaint, None] = {}
    unserved: dict[NamespacedName, Unserved] = {}
    has_all_but_node = False
    while not tracker.synced:
        if tracker.lacking <= DISPENSABLE and not has_all_but_node:
            has_all_but_node = True
            deadline = min(deadline, time.monotonic() + NODE_SECONDS)
        try:
            item = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            if has_all_but_node:
                break
            missing = ", ".join(sorted(tracker.lacking))
            raise Rejected(
                f"cannot read the cluster: no complete list of {missing} in time",
                "check that the API server is reachable and that the account may list these objects",
            ) from None
        match item:
            case Received(_, event):
                tracker.fold(event)
                complaints |= dict.fromkeys(_complaints(event))
                if isinstance(event, ServiceChanged):
                    unserved.pop(event.name, None)
                    if event.unserved:
                        unserved[event.name] = event.unserved
            case Died(source, error):
                if isinstance(error, EbpfProxyError):
                    raise error
                raise Rejected(f"cannot read the cluster: {source}: {error}") from error
    return Cluster(tracker.drain().state, tuple(complaints), unserved)


def _complaints(event: Event) -> list[Complaint]:
    match event:
        case Invalid():
            return [Complaint(event.kind, event.name, event.reason, partly=False)]
        case ServiceChanged(name, _, reasons):
            return [Complaint(SERVICE, str(name), reason, partly=True) for reason in reasons]
        case SliceChanged(name, _, reasons):
            return [Complaint(ENDPOINT_SLICE, str(name), reason, partly=True) for reason in reasons]
        case PodChanged(name, _, reasons):
            return [Complaint(POD, str(name), reason, partly=True) for reason in reasons]
    return []
