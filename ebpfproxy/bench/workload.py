"""A cluster of N Services with M endpoints each, and the pod that answers at all endpoint addresses."""

import ipaddress
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ebpfproxy.bench.load import Load, Target
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Lab, Pod, manifests

PORT = 80
ENDPOINT_PORT = 8080
NETWORK = ipaddress.ip_network("10.128.0.0/10")
"""The network of all endpoints. It is routed to one pod, so that every endpoint answers."""

SERVICES_MAX = 17_000
"""The maximum number of Services with NodePorts."""

_FIRST_NODE_PORT = 15_000
_SERVICE_NETWORK = ipaddress.ip_network("10.96.0.0/12")
_SERVICES_IN_A_FILE = 1000

_SERVICES_IN_A_NAMESPACE = 1000
"""As in a large cluster: one namespace cannot use all of a map (decision 0064)."""

ENDPOINTS_IN_A_SLICE = 100
"""The default of kube-controller-manager (--max-endpoints-per-slice)."""


def cluster_ip(index: int) -> str:
    """Return the ClusterIP of the Service with this index, from 0."""
    return str(_SERVICE_NETWORK[index + 1])


def endpoint_address(index: int) -> str:
    """Return the address of the endpoint with this index, from 0, counted over all Services."""
    return str(NETWORK[index + 1])


def service_targets(services: int) -> Iterator[Target]:
    """Return the ClusterIPs with port."""
    return ((cluster_ip(index), PORT) for index in range(services))


def node_port_targets(node: str, services: int) -> Iterator[Target]:
    """Return the NodePorts at this address of the node."""
    return ((node, node_port(index)) for index in range(services))


def endpoint_targets(services: int, endpoints: int) -> Iterator[Target]:
    """Return all endpoints."""
    return ((endpoint_address(index), ENDPOINT_PORT) for index in range(services * endpoints))


def other_targets(services: int, endpoints: int) -> Iterator[Target]:
    """Return as many targets at addresses of the same pod that are not endpoints.

    A packet directly to an endpoint may have the source port of a translated flow to it. For UDP, only
    connection tracking can distinguish them.
    """
    count = services * endpoints
    return ((endpoint_address(count + index), ENDPOINT_PORT) for index in range(count))


def server_pod(lab: Lab, load: Load, network: str = str(NETWORK)) -> Pod:
    """Create a pod that answers at every address of `network`. All of NETWORK is routed to it."""
    pod = lab.pod("server")
    lab.ip(pod, f"route add local {network} dev lo")
    lab.ip(lab.node, f"route add {NETWORK} via {pod.v4}")
    load.serve(pod, ENDPOINT_PORT)
    return pod


def node_port(index: int) -> int:
    """Return the NodePort of the Service with this index."""
    return _FIRST_NODE_PORT + index


def services(
    count: int, protocol: str = "TCP", *, node_ports: bool = False, affinity: int = 0, first: int = 0
) -> Iterator[manifests.Object]:
    """Yield `count` Services from index `first` on; `affinity` percent of them have session affinity."""
    for index in range(first, first + count):
        port = manifests.port(
            PORT,
            protocol=protocol,
            target=ENDPOINT_PORT,
            node_port=node_port(index) if node_ports else 0,
        )
        spec: dict[str, Any] = {"sessionAffinity": "ClientIP"} if has_affinity(index, affinity) else {}
        namespace = namespace_of(index)
        yield manifests.service(f"service-{index}", [cluster_ip(index)], [port], namespace=namespace, **spec)


def namespace_of(index: int) -> str:
    """Return the namespace of the Service with this index and of its slices.

    >>> namespace_of(999), namespace_of(1000)
    ('default', 'namespace-1')
    """
    number = index // _SERVICES_IN_A_NAMESPACE
    return f"namespace-{number}" if number else "default"


def has_affinity(index: int, percent: int) -> bool:
    """Whether the Service has session affinity if `percent` of all Services have it, evenly spread.

    >>> [index for index in range(20) if has_affinity(index, 10)]
    [9, 19]
    """
    return (index + 1) * percent // 100 > index * percent // 100


def endpoint_slices(
    index: int, addresses: Sequence[str], protocol: str = "TCP"
) -> Iterator[manifests.Object]:
    """Yield the slices of the Service with this index: at least one, as many as its endpoints need."""
    for number, start in enumerate(range(0, max(1, len(addresses)), ENDPOINTS_IN_A_SLICE)):
        part = addresses[start : start + ENDPOINTS_IN_A_SLICE]
        yield endpoint_slice(index, part, protocol, number=number)


def endpoint_slice(
    index: int, addresses: Sequence[str | manifests.Object], protocol: str = "TCP", *, number: int = 0
) -> manifests.Object:
    """Return a slice of the Service with this index. Its slices are numbered from 0.

    Endpoints given as addresses are on another node, as most endpoints of a large cluster.
    """
    ports = [manifests.port(ENDPOINT_PORT, protocol=protocol)]
    endpoints = [
        manifests.endpoint(each, node="elsewhere") if isinstance(each, str) else each for each in addresses
    ]
    name = f"service-{index}-slice" + (f"-{number}" if number else "")
    namespace = namespace_of(index)
    return manifests.endpoint_slice(
        name, f"service-{index}", endpoints, ports, namespace=namespace, family="IPv4"
    )


def addresses_of(index: int, endpoints: int) -> list[str]:
    """Return the addresses of the endpoints of the Service with this index."""
    return [endpoint_address(index * endpoints + each) for each in range(endpoints)]


def write(
    folder: Path,
    count: int,
    endpoints: int,
    protocol: str = "TCP",
    *,
    node_ports: bool = False,
    affinity: int = 0,
    first: int = 0,
) -> None:
    """Write Services from index `first` on and their slices to the folder of manifests, as JSON lists.

    Raises ConfigError with `node_ports` and more Services than there are NodePorts.
    """
    if node_ports:
        require_node_ports(count)
    folder.mkdir(exist_ok=True)
    objects = services(count, protocol, node_ports=node_ports, affinity=affinity, first=first)
    manifests.write(folder / "services.json", manifests.listed(objects))
    for start in range(first, first + count, _SERVICES_IN_A_FILE):
        slices = [
            each
            for index in range(start, min(start + _SERVICES_IN_A_FILE, first + count))
            for each in endpoint_slices(index, addresses_of(index, endpoints), protocol)
        ]
        manifests.write(folder / f"slices-{start}.json", manifests.listed(slices))


def require_node_ports(count: int) -> None:
    """Raise ConfigError for more Services than there are NodePorts."""
    if count > SERVICES_MAX:
        raise ConfigError(
            f"--services: {count} Services need more NodePorts than there are",
            f"give --services={SERVICES_MAX} or less",
        )
