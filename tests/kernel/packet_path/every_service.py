"""Services of all kinds for random packets, and the permitted outcomes of each frontend."""

from collections.abc import Mapping
from typing import Any

from ebpfproxy.model.address import (
    Address,
    Protocol,
    family,
    format_address,
    is_unspecified,
    parse_address,
    unspecified,
)
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.model.service import ServiceType, TrafficPolicy
from tests.support.build import HERE, endpoint, port, service, slice_of
from tests.support.packet_judge import FrontendKey, Offer
from tests.support.packet_path import NODE_V4, NODE_V6, PacketPath
from tests.support.random_packets import Target

_TCP, _UDP, _SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
_HERE = ("10.244.1.5", "fd00:1::5")
_ELSEWHERE = ("10.244.2.5", "fd00:2::5")


def serve_every_kind(
    path: PacketPath, tunnels: Mapping[str, str | None] | None = None
) -> dict[FrontendKey, Offer]:
    """Create Services of all kinds in both families. Returns the permitted outcomes of each frontend.

    `tunnels`: for Services with endpoints in all places; see `PacketPath.serve`.
    """
    offers: dict[FrontendKey, Offer] = {}
    every = [(_TCP, 80, 8080, 30080), (_UDP, 53, 5353, 30053), (_SCTP, 99, 9899, 30099)]
    for index, of in enumerate(("v4", "v6")):
        ip = {"v4": "10.96.0.{}", "v6": "fd00:96::{}"}[of]
        ports = [port(number, f"p{number}", protocol=p, node_port=node_port)
                 for p, number, _, node_port in every]  # fmt: skip
        targets = [EndpointPort(f"p{number}", p, target) for p, number, target, _ in every]
        here, there = endpoint(_HERE[index], HERE), endpoint(_ELSEWHERE[index])
        kinds: dict[str, Any] = {
            "ips": [ip.format(10)],
            "external": [ip.format(11)],
            "balancer": [ip.format(12)],
        }
        path.serve(
            service(f"web-{of}", *ports, **kinds, type_=ServiceType.LOAD_BALANCER, affinity=index * 60),
            slice_of(f"web-{of}", here, there, ports=targets),
            tunnels=tunnels,
        )
        path.serve(
            service(f"none-{of}", *(each._replace(node_port=0) for each in ports), ips=[ip.format(20)])
        )
        path.serve(
            service(
                f"local-{of}", port(80), ips=[ip.format(30)], external=[ip.format(31)],
                external_policy=TrafficPolicy.LOCAL, type_=ServiceType.LOAD_BALANCER,
            ),
            slice_of(f"local-{of}", there),
        )  # fmt: skip
        for protocol, number, target, node_port in every:
            places = frozenset((parse_address(each[index]), target) for each in (_HERE, _ELSEWHERE))
            for last in (10, 11, 12):
                offers[parse_address(ip.format(last)), number, protocol] = Offer(places)
            anywhere = unspecified(family(parse_address(ip.format(0))))
            offers[anywhere, node_port, protocol] = Offer(places)
            offers[parse_address(ip.format(20)), number, protocol] = Offer(frozenset(), rejects=True)
        only = frozenset({(parse_address(_ELSEWHERE[index]), 8080)})
        offers[parse_address(ip.format(30)), 80, _TCP] = Offer(only)
        offers[parse_address(ip.format(31)), 80, _TCP] = Offer(
            only, drops=True
        )  # for clients other than pods
    return offers


def targets_of(offers: dict[FrontendKey, Offer]) -> tuple[list[Target], list[Target]]:
    """The Services' frontends, and targets that differ from them by one bit of address or port, or by
    protocol."""
    services, others = [], []
    for address, number, protocol in offers:
        node = NODE_V4 if family(address) is family(parse_address(NODE_V4)) else NODE_V6
        text = node if is_unspecified(address) else format_address(address)
        services.append(Target(text, number, protocol))
        near = parse_address(text)[:-1] + bytes([parse_address(text)[-1] ^ 0x40])
        others.append(Target(format_address(Address(near)), number, protocol))
        others.append(Target(text, number ^ 0x100, protocol))
        others.append(Target(text, number, _UDP if protocol == _TCP else _TCP))
    known = set(services)
    return services, [each for each in others if each not in known]
