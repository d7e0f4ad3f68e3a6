"""Random states of a cluster. One Service always has healthy endpoints, and none of the others claims its
addresses.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase

from ebpfproxy.linux.netlink import links, local_addresses
from ebpfproxy.model.address import Family, Protocol, format_address, parse_address
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.endpoint import EndpointPort, Endpoints, EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName, Service, ServicePort, ServiceType
from tests.support import build
from tests.support.strategies import exposed_services

Exposed = tuple[Service, tuple[EndpointSlice, ...]]

STEADY = NamespacedName("default", "steady")
ADDRESSES = ("10.96.200.1", "fd00:10:96::c801")
"""The ClusterIPs of the Service whose endpoints are healthy."""
PORT, NODE_PORT, TARGET_PORT = 80, 30900, 8080

_NAMES = [NamespacedName("default", f"svc-{number}") for number in range(6)]


class Change(NamedTuple):
    state: ClusterState
    services: frozenset[NamespacedName]


def exposures(seed: int, count: int) -> list[Exposed]:
    """Return random Services with their EndpointSlices, from few names and addresses."""
    found: list[Exposed] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(exposed_services())
    def collect(each: Exposed) -> None:
        found.append(each)

    collect()
    return found


class Clusters:
    """A random history of states. The local addresses and devices are those of the calling thread's node."""

    def __init__(
        self,
        pool: Sequence[Exposed],
        seed: str,
        node: Node,
        endpoints: Sequence[tuple[str, str]],
    ) -> None:
        """`pool`: what the other Services can be. `endpoints`: the addresses of the healthy servers, by
        family."""
        self._random = random.Random(seed)
        self._pool = pool
        self._node = node
        self._endpoints = endpoints
        self._exposed: dict[NamespacedName, Exposed] = {}
        self._networks, self._devices = local_addresses.read(), links.read()
        for name in (STEADY, *_NAMES):
            self._change(name)

    @property
    def state(self) -> ClusterState:
        return ClusterState(
            {name: service for name, (service, _) in self._exposed.items()},
            {name: tuple(slices) for name, (_, slices) in self._exposed.items()},
            self._node,
            local_networks=self._networks,
            devices=self._devices,
        )

    def next(self) -> Change:
        """Change one to three Services."""
        names = self._random.sample([STEADY, *_NAMES], self._random.choice((1, 1, 2, 3)))
        for name in names:
            self._change(name)
        return Change(self.state, frozenset(names))

    def _change(self, name: NamespacedName) -> None:
        if name == STEADY:
            self._exposed[name] = self._steady()
        elif self._random.random() < 0.3:
            self._exposed.pop(name, None)
        else:
            service, slices = self._random.choice(self._pool)
            self._exposed[name] = (
                dataclasses.replace(service, name=name),
                tuple(dataclasses.replace(each, service=name) for each in slices),
            )

    def _steady(self) -> Exposed:
        service = Service(
            STEADY,
            (ServicePort("http", Protocol.TCP, PORT, NODE_PORT),),
            tuple(map(parse_address, ADDRESSES)),
            type=ServiceType.NODE_PORT,
            affinity_timeout=self._random.choice((0, 0, 10)),
        )
        chosen = self._random.sample(self._endpoints, self._random.randint(1, len(self._endpoints)))
        ports = (EndpointPort("http", Protocol.TCP, TARGET_PORT),)
        slices = tuple(
            EndpointSlice(
                NamespacedName("default", f"steady-{of.value}"),
                STEADY,
                of,
                ports,
                Endpoints(build.endpoint(pair[number], self._node.name) for pair in chosen),
            )
            for number, of in enumerate(Family)
        )
        return service, slices


def node_of(name: str, addresses: Sequence[str]) -> Node:
    return Node(name, "zone-a", addresses=tuple(map(parse_address, addresses)))


def frontends(node: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the frontends of the steady Service, by a name. `node`: the addresses of the node."""
    found = {f"cluster-ip-{each}": (each, PORT) for each in ADDRESSES}
    return found | {f"node-port-{each}": (format_address(parse_address(each)), NODE_PORT) for each in node}
