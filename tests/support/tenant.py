"""A tenant who writes random Services and EndpointSlices that an API server accepts."""

import random
from collections.abc import Iterator
from typing import Any

from ebpfproxy.lab import manifests
from ebpfproxy.lab.manifests import Object

NAMESPACE = "tenant"

_ALGORITHMS = ("random", "round-robin", "source-hash", "maglev", "least-connections", "wrr", "nonsense")
_NODE_PORTS = range(31000, 32700)


class Tenant:
    """Few of its Services are large, as the API permits: 100 ports, 1,000 endpoints in each of five slices.

    `node`, `pods`: the node's name and pod addresses. `wanted`: addresses that others have; the tenant claims
    them as external and load balancer addresses, and as endpoints.
    """

    def __init__(self, seed: int, node: str, pods: list[str], wanted: list[str]) -> None:
        self._pick = random.Random(seed)
        self._node = node
        self._pods = pods
        self._wanted = wanted
        self._free_ports = list(_NODE_PORTS)
        self._numbers: dict[str, int] = {}

    def changes(self, count: int) -> Iterator[tuple[str, list[Object]]]:
        """For each change: the name of a Service, and its objects; none: it is deleted."""
        for _ in range(count):
            name = f"t{self._pick.randrange(max(10, count // 4))}"
            yield name, [] if self._pick.random() < 0.1 else list(self._objects(name))

    def _objects(self, name: str) -> Iterator[Object]:
        pick = self._pick
        number = self._numbers.setdefault(name, len(self._numbers))
        ports = self._ports()
        yield self._service(name, number, ports)
        for index in range(pick.choice((0, 1, 1, 1, 2, 5))):
            yield self._slice(name, index, ports)

    def _size(self, usual: int, most: int) -> int:
        """Mostly small, sometimes large."""
        return self._pick.randint(1, most if self._pick.random() < 0.03 else usual)

    def _ports(self) -> list[tuple[str, str, int]]:
        """Name, protocol and number."""
        count = self._size(4, 100)
        numbers = self._pick.sample(range(1, 65536), count)
        return [
            (f"p{at}", self._pick.choice(("TCP", "UDP", "SCTP")), each) for at, each in enumerate(numbers)
        ]

    def _service(self, name: str, number: int, ports: list[tuple[str, str, int]]) -> Object:
        pick = self._pick
        kind = pick.choice(("ClusterIP", "NodePort", "LoadBalancer"))
        entries = []
        for called, protocol, port in ports:
            node_port = pick.choice(self._free_ports) if kind != "ClusterIP" and pick.random() < 0.2 else 0
            entries.append(manifests.port(port, name=called, protocol=protocol, node_port=node_port))
        spec: dict[str, Any] = {"type": kind}
        if pick.random() < 0.3:
            spec["externalIPs"] = self._addresses()
        if pick.random() < 0.3:
            spec["sessionAffinity"] = "ClientIP"
            spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": pick.randint(1, 86400)}}
        if pick.random() < 0.3:
            spec["internalTrafficPolicy"] = pick.choice(("Local", "Cluster"))
        if kind != "ClusterIP":
            spec["externalTrafficPolicy"] = pick.choice(("Local", "Cluster"))
        if kind == "LoadBalancer" and pick.random() < 0.5:
            spec["loadBalancerSourceRanges"] = [self._range() for _ in range(self._size(3, 500))]
        made = manifests.service(
            name,
            [f"10.100.{number >> 8}.{number & 255}", f"fd00:10:96::1:{number:x}"],
            entries,
            namespace=NAMESPACE,
            annotations=self._annotations(),
            **spec,
        )
        if kind == "LoadBalancer":
            made["status"] = {"loadBalancer": {"ingress": [{"ip": each} for each in self._addresses()]}}
        return made

    def _addresses(self) -> list[str]:
        pick = self._pick
        known = [*self._wanted, *self._pods]
        return [
            pick.choice(known) if pick.random() < 0.5 else self._address() for _ in range(self._size(2, 50))
        ]

    def _address(self) -> str:
        number = self._pick.getrandbits(16)
        return f"203.0.{number >> 8}.{number & 255}" if number % 2 else f"2001:db8:f::{number:x}"

    def _range(self) -> str:
        address = self._address()
        return f"{address}/{self._pick.randint(0, 128 if ':' in address else 32)}"

    def _annotations(self) -> dict[str, str]:
        pick = self._pick
        found = {}
        if pick.random() < 0.5:
            found["ebpfproxy/lb-algorithm"] = pick.choice(_ALGORITHMS)
        if pick.random() < 0.2:
            rules = (f"{self._address()}={pick.randint(0, 100)}" for _ in range(self._size(5, 2000)))
            found["ebpfproxy/endpoint-weights"] = ",".join(rules)
        if pick.random() < 0.2:
            found["ebpfproxy/slow-start"] = pick.choice(("30s", "-1s", "1000h", "x"))
        if pick.random() < 0.1:
            found["ebpfproxy/ebpf-forwarding"] = pick.choice(("dsr", "masquerade", "x"))
        return found

    def _slice(self, name: str, index: int, ports: list[tuple[str, str, int]]) -> Object:
        pick = self._pick
        v6 = pick.random() < 0.5
        known = [each for each in (*self._pods, *self._wanted) if (":" in each) is v6]
        entries = []
        for _ in range(self._size(5, 1000)):
            number = pick.getrandbits(16)
            other = f"fd00:9::{number:x}" if v6 else f"10.200.{number >> 8}.{number & 255}"
            ready, serving, terminating = (pick.random() < share for share in (0.9, 0.9, 0.1))
            node = pick.choice((self._node, "elsewhere", ""))
            address = pick.choice(known) if known and pick.random() < 0.2 else other
            entry = manifests.endpoint(
                address, node=node, ready=ready, serving=serving, terminating=terminating
            )
            entries.append(entry)
        targets = [manifests.port(pick.randint(1, 65535), name=n, protocol=p) for n, p, _ in ports]
        return manifests.endpoint_slice(
            f"{name}-{index}",
            name,
            entries,
            targets,
            namespace=NAMESPACE,
            family="IPv6" if v6 else "IPv4",
        )
