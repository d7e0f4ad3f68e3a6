"""Services for the tests of the packet path: three protocols, both families, and parameters for each."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from ebpfproxy.model.address import Protocol
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.model.service import ServiceType
from tests.support.build import HERE, endpoint, port, service, slice_of
from tests.support.packet_path import PacketPath
from tests.support.packets import V4, V6, Places

TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
PORTS = {TCP: 80, UDP: 53, SCTP: 99}
TARGETS = {TCP: 8080, UDP: 5353, SCTP: 9899}
NODE_PORTS = {TCP: 30080, UDP: 30053, SCTP: 30099}
CLIENT_PORT = 40000

families = pytest.mark.parametrize("at", [V4, V6], ids=["v4", "v6"])
protocols = pytest.mark.parametrize("protocol", [TCP, UDP, SCTP], ids=["tcp", "udp", "sctp"])
_PORTS = [port(n, p.name.lower(), protocol=p, node_port=NODE_PORTS[p]) for p, n in PORTS.items()]
_TARGETS = [EndpointPort(p.name.lower(), p, n) for p, n in TARGETS.items()]


def serve(
    path: PacketPath,
    at: Places,
    *targets: str,
    called: str = "web",
    node_ports: bool = True,
    tunnels: Mapping[str, str | None] | None = None,
    **fields: Any,
) -> None:
    """A Service with every kind of frontend. Those of `targets` outside this node's pod network are on
    another node. `fields` are those of `service`, `tunnels` those of `PacketPath.serve`."""
    given: dict[str, Any] = {
        "ips": [at.cluster],
        "external": [at.external],
        "balancer": [at.balancer],
        "type_": ServiceType.LOAD_BALANCER,
    } | fields
    ports = _PORTS if node_ports else [each._replace(node_port=0) for each in _PORTS]
    slice_ = slice_of(called, *_endpoints(targets), ports=_TARGETS)
    path.serve(service(called, *ports, **given), slice_, tunnels=tunnels)


def _endpoints(targets: Iterable[str]) -> list[Any]:
    own = ("10.244.1.", "fd00:1:", "192.0.2.10", "2001:db8::10")
    return [endpoint(each, HERE) if each.startswith(own) else endpoint(each) for each in targets]
