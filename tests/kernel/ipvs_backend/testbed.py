"""The IPVS backend in a separate network namespace. The endpoints have addresses of the node.

Kernels of container hosts often have no IPVS: tests/vm provides others.
"""

import contextlib
import socket
import struct
from collections.abc import Iterator

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.entries import IpvsSettings
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.ipvs.messages import ServerKey
from ebpfproxy.model.address import Family, Protocol, format_endpoint, parse_address, parse_network
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    NodePlan,
    NoEndpointAction,
    PlannedEndpoint,
    PlannedEndpoints,
    PolicyResult,
    Scope,
    ServicePortPlan,
)

VIP, ONE, TWO = "10.96.0.10", "192.0.2.101", "192.0.2.102"
NODE_ADDRESS = "192.0.2.1"
NODE = NodePlan(node_port_networks=frozenset({parse_network(f"{NODE_ADDRESS}/32")}))
LASTING = 30.0  # seconds; a connection that was reset is removed after ten


@contextlib.contextmanager
def run(settings: IpvsSettings = IpvsSettings()) -> Iterator[IpvsBackend]:  # noqa: B008 -- frozen
    """One run of the agent."""
    plane = IpvsBackend(settings, "nft")
    plane.open()
    try:
        yield plane
    finally:
        plane.close()


def plan(
    *endpoints: str, protocol: Protocol = Protocol.TCP, node_port: int = 0, here: bool = True
) -> ServicePortPlan:
    """A Service on port 80 of VIP, and on a NodePort if one is given, with policy Cluster."""
    plain, masqueraded = PolicyResult(Scope.CLUSTER, False), PolicyResult(Scope.CLUSTER, True)
    frontends = [(Frontend(parse_address(VIP), 80, protocol), FrontendKind.CLUSTER_IP, plain)]
    if node_port:
        dialled = Frontend(parse_address("0.0.0.0"), node_port, protocol)
        frontends.append((dialled, FrontendKind.NODE_PORT, masqueraded))
    return ServicePortPlan(
        ServicePortName("default", "web", "", protocol),
        Family.IPV4,
        tuple(FrontendPlan(dialled, kind, how, how, how) for dialled, kind, how in frontends),
        PlannedEndpoints(PlannedEndpoint(parse_address(each), 8080, True, here, here) for each in endpoints),
        NoEndpointAction.DROP if endpoints else NoEndpointAction.REJECT,
    )


def bring(plane: IpvsBackend, *plans: ServicePortPlan, node: NodePlan = NODE) -> None:
    """Replace the current state by these plans, and check that no difference is left."""
    wanted = plane.render(plans, node)
    assert not plane.apply(diff(plane.read(), wanted))
    assert not diff(plane.read(), wanted)


def key(address: str = VIP, port: int = 80, protocol: Protocol = Protocol.TCP) -> ServerKey:
    return ServerKey(parse_address(address), port, protocol)


def weights(at: ServerKey | None = None) -> dict[str, int]:
    """The weights of the virtual server's endpoints."""
    reals = ipvs.read_one(at or key()).reals
    return {format_endpoint(real.address, real.port): real.weight for real in reals}


@contextlib.contextmanager
def connected(address: str = VIP, port: int = 80) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection to a Service with the endpoint ONE. It ends by a reset, so that IPVS removes
    it soon."""
    with socket.create_server((ONE, 8080)) as server:
        client = socket.create_connection((address, port), timeout=10)
        served, _ = server.accept()
    try:
        yield client, served
    finally:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        served.close()


def converse(client: socket.socket, served: socket.socket) -> None:
    served.settimeout(10)
    client.sendall(b"hello")
    assert served.recv(16) == b"hello"
    served.sendall(b"there")
    assert client.recv(16) == b"there"
