"""To what a client connects: an address or a Service, with or without port and protocol."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import NamedTuple

from ebpfproxy.diagnose.explain.result import Destination
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.errors import ConfigError, NotFound
from ebpfproxy.model.address import (
    Address,
    Protocol,
    family,
    format_address,
    is_unspecified,
    loopback,
    parse_address,
)
from ebpfproxy.model.service import NamespacedName, ServicePortName
from ebpfproxy.plan.node_ports import host_ips
from ebpfproxy.plan.service_plan import Frontend, FrontendKind, ServicePortPlan

ICMP = "icmp"

_PROTOCOLS = {protocol.name.lower(): protocol for protocol in Protocol}
_DNS = re.compile(r"(?P<name>[^.]+)\.(?P<namespace>[^.]+)(?:\.svc(?:\..*)?)?")
_HINT = "write an address or a Service, such as 10.96.0.10:443/TCP, [fd00::1]:80, web, or prod/web:https"
_UNKNOWN = (
    "check the namespace and the name; the API server sends no headless Service and none of another proxy"
)


class Request(NamedTuple):
    """A destination as it was written.

    - `address`, or else `service`.
    - `port`: a number or the name of a Service's port, "" for all ports.
    - `protocol`: None for any; `echo`: an echo request instead.
    """

    address: Address | None
    service: NamespacedName | None
    port: str = ""
    protocol: Protocol | None = None
    echo: bool = False


class Target(NamedTuple):
    """A destination, and the ServicePort that was asked for, None if an address was."""

    destination: Destination
    asked: ServicePortName | None = None


def parse(text: str) -> Request:
    """Parse a destination. Raises ConfigError.

    >>> parse("10.96.0.10:80/tcp").port, parse("prod/web:https").service, parse("web.prod.svc").service
    ('80', NamespacedName(namespace='prod', name='web'), NamespacedName(namespace='prod', name='web'))
    """
    head, slash, tail = text.rpartition("/")
    protocol = tail.lower() if slash and tail.lower() in (*_PROTOCOLS, ICMP) else ""
    host, port = _split_port(head if protocol else text)
    rest = {"port": port, "protocol": _PROTOCOLS.get(protocol), "echo": protocol == ICMP}
    address = _address(host)
    if address is not None:
        if port and not _is_port(port):
            raise ConfigError(f"cannot explain {text!r}: {port!r} is no port number", _HINT)
        return Request(address, None, **rest)  # type: ignore[arg-type]
    namespace, slash, name = host.rpartition("/")
    if not slash and (found := _DNS.fullmatch(host)):
        namespace, name = found["namespace"], found["name"]
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) or "/" in namespace:
        raise ConfigError(f"cannot explain {text!r}: it is neither an address nor a Service", _HINT)
    return Request(None, NamespacedName(namespace or "default", name), **rest)  # type: ignore[arg-type]


def _split_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, tail = text[1:].partition("]")
        return host, tail.removeprefix(":")
    host, colon, port = text.rpartition(":")
    return (host, port) if colon and ":" not in host else (text, "")


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16


def _address(text: str) -> Address | None:
    try:
        return parse_address(text)
    except ValueError:
        return None


def targets(request: Request, situation: Situation) -> list[Target]:
    """Return the destinations of a request: each frontend of the address or Service, sorted.

    An address with a port is one destination, whether or not a Service has it; without a protocol, each
    protocol that a Service has at the port, else TCP. Raises NotFound if nothing has the address or the
    Service does not exist. Empty if the Service exists, but no such frontend.
    """
    if request.address is not None:
        if request.echo:
            return [Target(Destination(request.address, 0, None))]
        return [Target(each) for each in _at_address(request.address, request, situation)]
    assert request.service
    found = list(_of_service(request.service, request, situation))
    if request.echo:
        return list(
            dict.fromkeys(t._replace(destination=Destination(t.destination.address, 0, None)) for t in found)
        )
    return found


def _at_address(address: Address, request: Request, situation: Situation) -> list[Destination]:
    if request.port and request.protocol:
        return [Destination(address, int(request.port), request.protocol)]
    is_own = situation.accepts_node_ports(address)
    frontends = [each.frontend.frontend for each in situation.addresses.get(address, ())]
    if is_own:
        frontends += [
            each
            for each in situation.frontends
            if is_unspecified(each.address) and family(each.address) is family(address)
        ]
    of_port = [each for each in frontends if _matches(each, request)]
    if request.port:
        protocols = sorted({each.protocol for each in of_port}) or [Protocol.TCP]
        return [Destination(address, int(request.port), protocol) for protocol in protocols]
    if not of_port:
        raise NotFound(
            f"no Service has the address {format_address(address)}", "give a port, for example :80"
        )
    pairs = sorted({(each.port, each.protocol) for each in of_port})
    return [Destination(address, port, protocol) for port, protocol in pairs]


def _matches(frontend: Frontend, request: Request) -> bool:
    if request.protocol and frontend.protocol is not request.protocol:
        return False
    return not request.port or frontend.port == int(request.port)


def _of_service(name: NamespacedName, request: Request, situation: Situation) -> Iterator[Target]:
    """Yield every frontend that the Service claims, those that another Service has included."""
    if name not in situation.requested:
        if name in situation.unserved or situation.complaints_about(name):
            return
        raise _no_service(name, situation)
    for plan in situation.requested[name]:
        if request.protocol and plan.name.protocol is not request.protocol:
            continue
        for each in plan.frontends:
            if request.port and not _is_of_port(plan, each.frontend, request.port):
                continue
            address: Address | None = each.frontend.address
            if each.kind is FrontendKind.NODE_PORT:
                address = node_port_address(situation, each.frontend)
            if address:
                yield Target(Destination(address, each.frontend.port, each.frontend.protocol), plan.name)


def _is_of_port(plan: ServicePortPlan, frontend: Frontend, port: str) -> bool:
    """Whether the port is the name or number of the ServicePort, or this NodePort."""
    if port in (plan.name.port, str(frontend.port)):
        return True
    return any(
        str(each.frontend.port) == port for each in plan.frontends if each.kind is FrontendKind.CLUSTER_IP
    )


def node_port_address(situation: Situation, frontend: Frontend) -> Address | None:
    """Return an address of the node that accepts NodePorts: the primary one, else the smallest one."""
    of = family(frontend.address)
    primary = [each for each in host_ips(situation.state.node, situation.context) if family(each) is of]
    usable = [each for each in primary if situation.accepts_node_ports(each)]
    usable += sorted(
        net.address
        for net in situation.node.node_port_networks
        if net.length == 128 and family(net.address) is of and net.address != loopback(of)
    )
    return next(iter(usable or primary), None)


def _no_service(name: NamespacedName, situation: Situation) -> NotFound:
    known = {str(each): each for each in (*situation.requested, *situation.unserved)}
    similar = get_close_matches(str(name), known, n=3, cutoff=0.5)
    same_name = [text for text, each in known.items() if each.name == name.name]
    candidates = list(dict.fromkeys([*same_name, *similar]))[:3]
    hint = f"did you mean {', '.join(candidates)}?" if candidates else _UNKNOWN
    return NotFound(f"no Service {name} is known", hint)
