"""Parsers for parts of API objects: names, addresses, networks, ports, policies, endpoints, times.

Each part is checked on its own. Invalid parts are left out and reported as a complaint: one line for the
log, with the API's field names. These functions raise only InvalidObject.
"""

import datetime
import functools
import re
import sys
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec

from ebpfproxy.api import fields
from ebpfproxy.api.event import Excess
from ebpfproxy.errors import InvalidObject
from ebpfproxy.model.address import (
    V4_PREFIX,
    Address,
    Family,
    Network,
    Protocol,
    family,
    parse_address,
    parse_network,
    unspecified,
)
from ebpfproxy.model.endpoint import EndpointPort, Endpoints, EndpointState
from ebpfproxy.model.service import NamespacedName, ServicePort, ServiceType, TrafficPolicy

DEFAULT_AFFINITY_TIMEOUT = 10800
"""Seconds. The API server's default (core/v1 DefaultClientIPServiceAffinitySeconds)."""

MAX_AFFINITY_TIMEOUT = 86400
"""Seconds (core/v1 MaxClientIPServiceAffinitySeconds)."""

JUNK = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"""The exceptions of decoders. UnicodeDecodeError is a ValueError; deep nesting raises RecursionError."""

PROTOCOLS = {None: Protocol.TCP, "": Protocol.TCP} | {p.name: p for p in Protocol}
FAMILIES = {f.value: f for f in Family}
_UNSPECIFIED = frozenset(unspecified(f) for f in Family)
_MAX_COMPLAINTS = 8
_ALL_NIL = fields.Conditions()
_NO_HINTS = fields.Hints()

NAME = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,252}")
"""An object or port name. Wider than the API's rules, but without blanks, quotes and control characters:
names become part of rules and comments that other programs parse."""


class Complaints(list[str]):
    """The complaints about one object, in order. `excess` is the one about a bound."""

    excess: Excess | None = None

    def reported(self) -> tuple[str, ...]:
        """Return all complaints, or the first `_MAX_COMPLAINTS` and the number of the others."""
        if len(self) <= _MAX_COMPLAINTS:
            return tuple(self)
        return (*self[:_MAX_COMPLAINTS], f"and {len(self) - _MAX_COMPLAINTS} more")


_T = TypeVar("_T", ServiceType, TrafficPolicy)


def shorten(text: str, longest: int = 160) -> str:
    """Return the text, cut to `longest` characters with "..." at the end."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def usable_name(head: fields.Metadata | fields.HeadMetadata) -> NamespacedName:
    """Return the object's name. A missing namespace means "default", as for kubectl. Raises InvalidObject."""
    return _usable_name(head.namespace or "default", head.name or "")


@functools.lru_cache(maxsize=1024)
def _usable_name(namespace: str, name: str) -> NamespacedName:
    """Cached: an object's head and the complete object are decoded in succession and share one name."""
    if not NAME.fullmatch(name) or not NAME.fullmatch(namespace):
        raise InvalidObject(f"{shorten(repr(namespace + '/' + name))} is not a usable name")
    return NamespacedName(sys.intern(namespace), name)


def choice(kind: type[_T], text: str | None, default: _T, where: str, complaints: Complaints) -> _T:
    """Return the member of an enum, or `default` if the text is missing, empty or unknown."""
    if not text:
        return default
    try:
        return kind(text)
    except ValueError:
        complaints.append(f"{where} {shorten(repr(text))} is taken as {default.value}")
        return default


def policy(text: str | None, where: str, complaints: Complaints) -> TrafficPolicy:
    """Return the traffic policy; Cluster if the text is missing, empty or unknown."""
    return choice(TrafficPolicy, text, TrafficPolicy.CLUSTER, where, complaints)


def addresses(texts: Iterable[str | None], where: str, complaints: Complaints) -> tuple[Address, ...]:
    """Return the valid addresses, in order, without duplicates. Blank texts are dropped silently, as in
    MapIPsByIPFamily (pkg/proxy/util/utils.go).

    0.0.0.0 and :: are rejected: a frontend with one of them would match every local address.
    """
    valid: dict[Address, None] = {}
    for text in texts:
        if text is None or not text.strip():
            continue
        try:
            address = parse_address(text)
        except ValueError:
            complaints.append(f"{where}: {shorten(repr(text))} is not an IP address")
            continue
        if address in _UNSPECIFIED:
            complaints.append(f"{where}: {text} cannot be served")
        else:
            valid[address] = None
    return tuple(valid)


def cluster_ips(spec: fields.ServiceSpec, complaints: Complaints) -> tuple[Address, ...]:
    """Return at most one address of each family, as GetClusterIPByFamily (pkg/proxy/util/utils.go).

    Objects older than dual-stack have only clusterIP. If ipFamilies is missing, which the API server never
    sends, the family of each address counts. Raises InvalidObject if no address remains.
    """
    texts = spec.cluster_ips or [spec.cluster_ip]
    families = spec.ip_families or []
    valid: dict[Family, Address] = {}
    for position, text in enumerate(texts):
        for address in addresses([text], "clusterIPs", complaints):
            address_family = family(address)
            if families and (position >= len(families) or families[position] != address_family.value):
                complaints.append(f"clusterIPs: {text} is not of the family in ipFamilies")
            else:
                valid.setdefault(address_family, address)
    if not valid:
        raise InvalidObject("; ".join(complaints.reported()) or "it has no cluster IP")
    return tuple(valid.values())


def load_balancer_ips(status: fields.ServiceStatus | None, complaints: Complaints) -> tuple[Address, ...]:
    """Return the ingress addresses of ipMode VIP, the default (KEP-1860).

    Traffic to addresses of any other mode must go out to the load balancer.
    """
    ingress = (status.load_balancer.ingress if status and status.load_balancer else None) or ()
    texts = (entry.ip for entry in ingress if entry and entry.ip_mode in (None, "VIP"))
    return addresses(texts, "status.loadBalancer.ingress", complaints)


def networks(texts: Iterable[str | None], where: str, complaints: Complaints) -> tuple[Network, ...]:
    """Return the valid CIDRs, in order, without duplicates. Blank texts are dropped silently."""
    valid: dict[Network, None] = {}
    for text in texts:
        if text is None or not text.strip():
            continue
        try:
            valid[parse_network(text)] = None
        except ValueError:
            complaints.append(f"{where}: {shorten(repr(text))} is not a CIDR")
    return tuple(valid)


def source_ranges(texts: Iterable[str | None], complaints: Complaints) -> tuple[Network, ...]:
    """Return the valid CIDRs.

    Raises InvalidObject if ranges are given but none is valid: an empty list would admit every client.
    """
    given = [text for text in texts if text and text.strip()]
    valid = networks(given, "loadBalancerSourceRanges", complaints)
    if given and not valid:
        raise InvalidObject("loadBalancerSourceRanges has no valid CIDR; serving it would admit every client")
    return valid


def affinity_timeout(spec: fields.ServiceSpec, complaints: Complaints) -> int:
    """Return the timeout of client IP affinity in seconds; 0 without affinity."""
    if spec.session_affinity in (None, "", "None"):
        return 0
    if spec.session_affinity != "ClientIP":
        complaints.append(f"sessionAffinity {shorten(repr(spec.session_affinity))} is taken as None")
        return 0
    config = spec.session_affinity_config
    timeout = config.client_ip.timeout_seconds if config and config.client_ip else None
    if timeout is None:
        return DEFAULT_AFFINITY_TIMEOUT
    if not 1 <= timeout <= MAX_AFFINITY_TIMEOUT:
        complaints.append(f"sessionAffinity: a timeout of {shorten(str(timeout))} s is taken as 10800 s")
        return DEFAULT_AFFINITY_TIMEOUT
    return timeout


def node_port(number: int | None, where: str, complaints: Complaints) -> int:
    """Return the port number; 0 if it is missing or invalid."""
    if number and not 0 < number < 65536:
        complaints.append(f"{where} {shorten(str(number))} is not a port number (1 to 65535)")
        return 0
    return number or 0


def _port_key(
    port: fields.ServicePort | fields.SlicePort, complaints: Complaints
) -> tuple[str, Protocol, int] | None:
    """Return name, protocol and number. If the port cannot be served, add a complaint and return None."""
    name, number = port.name or "", port.port or 0
    if name and not NAME.fullmatch(name):
        complaints.append(f"ports: {shorten(repr(name))} is not a usable name")
    elif port.protocol not in PROTOCOLS:
        complaints.append(f"ports: protocol {shorten(repr(port.protocol))} is unknown")
    elif not 0 < number < 65536:
        complaints.append(f"ports: {shorten(str(number))} is not a port number (1 to 65535)")
    else:
        return sys.intern(name), PROTOCOLS[port.protocol], number
    return None


def service_ports(
    decoded: Iterable[fields.ServicePort | None], complaints: Complaints
) -> tuple[ServicePort, ...]:
    """Return the valid ports. Name and protocol identify a port: of duplicates, the first is served."""
    valid: dict[tuple[str, Protocol], ServicePort] = {}
    for port in decoded:
        key = _port_key(port, complaints) if port else None
        if not port or not key:
            continue
        name, protocol, number = key
        if (name, protocol) in valid:
            complaints.append(f"ports: {name!r} {protocol.name} is defined twice; the first is served")
            continue
        external = node_port(port.node_port, "nodePort", complaints)
        valid[name, protocol] = ServicePort(name, protocol, number, external)
    return _shared_service_ports(*valid.values())


def slice_ports(
    decoded: Iterable[fields.SlicePort | None], complaints: Complaints
) -> tuple[EndpointPort, ...]:
    """Return the valid ports.

    A missing name is "", as the API server writes it (SetDefaults_EndpointPort, pkg/apis/discovery/v1). A
    port without a number stands for all ports, which no Service has: it is ignored (endpointslicecache.go).
    """
    keys = (_port_key(port, complaints) for port in decoded if port and port.port)
    return _shared_slice_ports(*[key for key in keys if key])


@functools.lru_cache(maxsize=4096)
def _shared_service_ports(*ports: ServicePort) -> tuple[ServicePort, ...]:
    """Cached: most Services have the same ports and share one tuple."""
    return ports


@functools.lru_cache(maxsize=4096)
def _shared_slice_ports(*keys: tuple[str, Protocol, int]) -> tuple[EndpointPort, ...]:
    """Cached, as the ports of Services."""
    return tuple(EndpointPort(*key) for key in keys)


def endpoints(
    decoded: Iterable[fields.Endpoint | None], slice_family: Family, namespace: str, complaints: Complaints
) -> Endpoints:
    """Return the valid endpoints, in order. `namespace`: that of the slice.

    Only the first address of an endpoint is used: discovery/v1 gives the others no meaning.
    """
    is_ipv4 = slice_family is Family.IPV4
    valid: list[Address] = []
    states: list[EndpointState] = []
    for endpoint in decoded:
        text = endpoint.addresses[0] if endpoint and endpoint.addresses else None
        if not endpoint or not text:
            complaints.append("endpoints: an endpoint has no address")
            continue
        try:
            address = parse_address(text)
        except ValueError:
            complaints.append(f"endpoints: {shorten(repr(text))} is not an IP address")
            continue
        if address.startswith(V4_PREFIX) is not is_ipv4 or address in _UNSPECIFIED:
            complaints.append(f"endpoints: {text} is not an {slice_family.value} address that can be served")
            continue
        conditions, target = endpoint.conditions or _ALL_NIL, endpoint.target_ref
        valid.append(address)
        states.append(
            _state(
                conditions.ready is not False,
                conditions.serving is not False,
                conditions.terminating is True,
                endpoint.node_name or "",
                bytes(endpoint.hints),
                target is not None and (target.kind, target.namespace) == ("Pod", namespace),
            )
        )
    return Endpoints.packed(b"".join(valid), _shared_states(*states))


@functools.lru_cache(maxsize=4096)
def _shared_states(*states: EndpointState) -> tuple[EndpointState, ...]:
    """Cached, as the ports of Services: endpoints of a node are often all of an EndpointSlice."""
    return states


@functools.lru_cache(maxsize=16384)
def _state(
    ready: bool, serving: bool, terminating: bool, node: str, hints: bytes, own_pod: bool
) -> EndpointState:
    """Cached: hints are decoded once, and endpoints of the same node share one object in memory."""
    decoded = (fields.HINTS_DECODER.decode(hints) if hints else None) or _NO_HINTS
    zones, nodes = _names(decoded.for_zones), _names(decoded.for_nodes)
    return EndpointState(ready, serving, terminating, sys.intern(node), zones, nodes, own_pod)


def _names(hints: list[fields.Hint | None] | None) -> frozenset[str]:
    return frozenset(hint.name for hint in hints or () if hint and hint.name)


_AWARE = Annotated[datetime.datetime, msgspec.Meta(tz=True)]


def moment(text: str) -> float | None:
    """RFC 3339 with up to nanoseconds, as Unix seconds; None for anything else.

    >>> moment("1970-01-01T00:01:00.123456789Z")
    60.123457
    """
    try:
        when: datetime.datetime = msgspec.convert(text, _AWARE)
        return when.timestamp()
    except JUNK:
        return None
