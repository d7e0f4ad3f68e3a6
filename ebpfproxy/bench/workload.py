"""A cluster of N Services with M endpoints each, and the pod that answers at all those addresses."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.bench.load import Load, Target
from ebpfproxy.lab import Lab, Pod, manifests

PORT = 80
ENDPOINT_PORT = 8080
NETWORK = ipaddress.ip_network("10.128.0.0/10")
"""Where all endpoints are: one pod takes it whole, so that any number of them really answers."""

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


def endpoint_targets(services: int, endpoints: int) -> Iterator[Target]:
    return ((endpoint_address(index), ENDPOINT_PORT) for index in range(services * endpoints))


def server_pod(lab: Lab, load: Load, answering: str = str(NETWORK)) -> Pod:
    """A pod that answers at every address of a part of NETWORK, and to which all of NETWORK is sent."""
    pod = lab.pod("server")
    lab.ip(pod, f"route add local {answering} dev lo")
    lab.ip(lab.node, f"route add {NETWORK} via {pod.v4}")
    load.serve(pod, ENDPOINT_PORT)
    return pod


def services(count: int) -> Iterator[manifests.Object]:
    ports = [manifests.port(PORT, target=ENDPOINT_PORT)]
    return (manifests.service(f"service-{index}", [cluster_ip(index)], ports) for index in range(count))


def endpoint_slice(index: int, addresses: list[str]) -> manifests.Object:
    """The only slice of the Service of this index."""
    ports = [manifests.port(ENDPOINT_PORT)]
    return manifests.endpoint_slice(f"service-{index}-slice", f"service-{index}", addresses, ports)


def write(folder: Path, count: int, endpoints: int) -> None:
    """Write the folder of manifests: lists in JSON, as the API server would give them."""
    folder.mkdir()
    manifests.write(folder / "services.json", manifests.listed(services(count)))
    for first in range(0, count, _SLICES_IN_A_FILE):
        slices = [
            endpoint_slice(index, [endpoint_address(index * endpoints + each) for each in range(endpoints)])
            for index in range(first, min(first + _SLICES_IN_A_FILE, count))
        ]
        manifests.write(folder / f"slices-{first}.json", manifests.listed(slices))
