"""The class of a client, by the device that leads to it."""

from ebpfproxy.diagnose.explain import host
from ebpfproxy.diagnose.explain.origin import classify
from ebpfproxy.diagnose.explain.result import ClientClass, Verdict
from ebpfproxy.linux.netlink.routing import Route
from ebpfproxy.model.address import Address, Family, network, parse_address
from ebpfproxy.model.device import ETHERNET, Device
from ebpfproxy.model.service import ServiceType, TrafficPolicy
from tests.support.build import endpoint, port, service, slice_of
from tests.unit.diagnose.explain import scene

DOCKER = parse_address("172.17.0.1")
GUEST = "172.17.0.2"
DEVICES = (
    *scene.DEVICES,
    Device(
        20, "docker0", "bridge", ETHERNET, True, addresses=(DOCKER,), networks=(network(DOCKER, 96 + 16),)
    ),
    Device(21, "vguest", "veth", ETHERNET, True, 20, "bridge", peer_elsewhere=True),
)


def test_a_guest_of_docker_is_a_client_outside() -> None:
    def routes(address: Address) -> Route:
        return Route(20, DOCKER) if address == parse_address(GUEST) else scene.route(address)

    web = service(
        "web",
        port(80, node_port=30080),
        type_=ServiceType.NODE_PORT,
        external_policy=TrafficPolicy.LOCAL,
    )
    remote = slice_of("web", endpoint(scene.REMOTE_POD))
    of = scene.situation(web, remote, devices=DEVICES, routes=routes)
    origin = host.origin_of(GUEST, of, live=False)
    assert classify(origin, of, Family.IPV4).client is ClientClass.OUTSIDE
    assert scene.explained(of, scene.to(scene.NODE, 30080), origin).verdict is Verdict.DROPPED
    assert scene.explained(of, scene.to(scene.NODE, 30080), scene.A_POD).verdict is Verdict.CONNECTS
