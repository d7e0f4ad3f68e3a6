"""Which frontends the canary connects to."""

import pytest

from ebpfproxy.diagnose.canary.choice import paths_of
from ebpfproxy.diagnose.explain.destination import parse
from ebpfproxy.diagnose.explain.origin import Origin
from ebpfproxy.errors import NotFound
from ebpfproxy.model.address import Protocol
from ebpfproxy.model.service import ServiceType
from tests.support.build import endpoint, port, service, slice_of
from tests.unit.diagnose.explain.scene import A_CLIENT, A_POD, NODE, THE_NODE, situation

UPLINK = A_CLIENT._replace(interface="eth0", ifindex=2)
WEB = service("web", port(80, node_port=30080), type_=ServiceType.NODE_PORT)
API = service("kubernetes", port(443), ips=["10.96.0.1"])
STICKY = service("alpha", ips=["10.96.0.11"], affinity=60)
DNS = service("dns", port(53, protocol=Protocol.UDP), ips=["10.96.0.12"])
SITUATION = situation(
    WEB, API, STICKY, DNS, *(slice_of(name, endpoint()) for name in ("web", "kubernetes", "alpha"))
)


def chosen(origin: Origin, *named: str) -> list[list[str]]:
    return [list(map(str, each)) for each in paths_of(SITUATION, origin, list(map(parse, named))).values()]


def test_the_api_server_is_the_first_choice_and_session_affinity_the_last() -> None:
    cluster_ips, *node_ports = chosen(THE_NODE)
    assert cluster_ips == ["10.96.0.1:443/TCP", "10.96.0.10:80/TCP", "10.96.0.11:80/TCP"]
    assert node_ports == [[f"{NODE}:30080/TCP"], ["127.0.0.1:30080/TCP"]]


def test_a_pod_does_not_use_loopback_and_a_client_outside_no_cluster_ip() -> None:
    assert chosen(A_POD)[1:] == [[f"{NODE}:30080/TCP"]]
    assert chosen(UPLINK) == [[f"{NODE}:30080/TCP"]]


def test_each_frontend_of_a_named_service_is_a_path() -> None:
    assert chosen(A_POD, "default/web", "dns") == [
        ["10.96.0.12:53/UDP"],
        ["10.96.0.10:80/TCP"],
        [f"{NODE}:30080/TCP"],
    ]


def test_an_unknown_service_is_an_error() -> None:
    with pytest.raises(NotFound, match="no Service default/none is known"):
        chosen(THE_NODE, "none")
