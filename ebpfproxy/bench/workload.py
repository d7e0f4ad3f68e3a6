"""A cluster of N Services with M endpoints each, and the pod that answers at all those addresses."""

import ipaddress
from collections.abc import Iterator, Sequence
from pathlib import Path

from ebpfproxy.bench.load import Load, Target
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Lab, Pod, manifests

PORT = 80
ENDPOINT_PORT = 8080
NETWORK = ipaddress.ip_network("10.128.0.0/10")
"""Where all endpoints are: one pod takes it whole, so that any number of them really answers."""

SERVICES_MAX = 17_000
"""Where each has a NodePort."""

_FIRST_NODE_PORT = 15_000
_SERVICE_NETWORK = ipaddress.ip_network("10.96.0.0/12")
_SLICES_IN_A_FILE = 1000


def cluster_ip(index: int) -> str:
    """That of the Service of this index, from 0."""
    return str(_SERVICE_NETWORK[index + 1])


def endpoint_address(index: int) -> str:
    """That of the endpoint of this index, from 0, over all Services."""
    return str(NETWORK[index + 1])


def service_targets(services: int) -> Iterator[Target]:
    return ((cluster_ip(index), PORT) for index in range(services))


def node_port_targets(node: str, services: int) -> Iterator[Target]:
    """At that address of the node."""
    return ((node, node_port(index)) for index in range(services))


def endpoint_targets(services: int, endpoints: int) -> Iterator[Target]:
    return ((endpoint_address(index), ENDPOINT_PORT) for index in range(services * endpoints))


def other_targets(services: int, endpoints: int) -> Iterator[Target]:
    """As many, at addresses of the same pod that are no Service's endpoints.

    A packet straight to an endpoint may be from the very port that a translated flow to it is from, and of
    UDP only connection tracking would tell the two apart.
    """
    count = services * endpoints
    return ((endpoint_address(count + index), ENDPOINT_PORT) for index in range(count))


def server_pod(lab: Lab, load: Load, answering: str = str(NETWORK)) -> Pod:
    """A pod that answers at every address of a part of NETWORK, and to which all of NETWORK is sent."""
    pod = lab.pod("server")
    lab.ip(pod, f"route add local {answering} dev lo")
    lab.ip(lab.node, f"route add {NETWORK} via {pod.v4}")
    load.serve(pod, ENDPOINT_PORT)
    return pod


def node_port(index: int) -> int:
    """That of the Service of this index, where Services have one."""
    return _FIRST_NODE_PORT + index


def services(count: int, protocol: str = "TCP", *, node_ports: bool = False) -> Iterator[manifests.Object]:
    for index in range(count):
        port = manifests.port(
            PORT,
            protocol=protocol,
            target=ENDPOINT_PORT,
            node_port=node_port(index) if node_ports else 0,
        )
        yield manifests.service(f"service-{index}", [cluster_ip(index)], [port])


def endpoint_slice(
    index: int, addresses: Sequence[str | manifests.Object], protocol: str = "TCP"
) -> manifests.Object:
    """The only slice of the Service of this index. As of all pods, it says on which node they are: of those
    given as addresses, on another one, as with all but a few of so many."""
    ports = [manifests.port(ENDPOINT_PORT, protocol=protocol)]
    endpoints = [
        manifests.endpoint(each, node="elsewhere") if isinstance(each, str) else each for each in addresses
    ]
    return manifests.endpoint_slice(f"service-{index}-slice", f"service-{index}", endpoints, ports)


def write(
    folder: Path, count: int, endpoints: int, protocol: str = "TCP", *, node_ports: bool = False
) -> None:
    """Write the folder of manifests: lists in JSON, as the API server would give them.

    Raises ConfigError for more Services than there are NodePorts, where they have one.
    """
    if node_ports:
        require_node_ports(count)
    folder.mkdir()
    manifests.write(
        folder / "services.json", manifests.listed(services(count, protocol, node_ports=node_ports))
    )
    for first in range(0, count, _SLICES_IN_A_FILE):
        slices = [
            endpoint_slice(
                index,
                [endpoint_address(index * endpoints + each) for each in range(endpoints)],
                protocol,
            )
            for index in range(first, min(first + _SLICES_IN_A_FILE, count))
        ]
        manifests.write(folder / f"slices-{first}.json", manifests.listed(slices))


def require_node_ports(count: int) -> None:
    """Raises ConfigError for more Services than there are NodePorts."""
    if count > SERVICES_MAX:
        raise ConfigError(f"{count} services are more than {SERVICES_MAX}, one for each NodePort")
