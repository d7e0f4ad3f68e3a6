"""Which frontends a client connects to, so that each path is tried once. Pure."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from ebpfproxy.diagnose.explain.destination import Request, node_port_address, targets
from ebpfproxy.diagnose.explain.origin import Origin
from ebpfproxy.diagnose.explain.result import ClientClass, Destination
from ebpfproxy.diagnose.situation import Served, Situation
from ebpfproxy.model.address import Address, Family, Protocol, family, loopback
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.endpoints import API_SERVER
from ebpfproxy.plan.service_plan import FrontendKind


class PathKey(NamedTuple):
    """What distinguishes the paths of one client. `named`: the destination, if the user named it."""

    kind: FrontendKind
    family: Family
    is_loopback: bool
    is_restricted: bool
    named: Destination | None = None


Paths = dict[PathKey, list[Destination]]
"""The destinations of each path, the best first."""


def paths_of(situation: Situation, origin: Origin, named: Collection[Request] = ()) -> Paths:
    """Return the paths of a client.

    Without `named`, each kind of frontend in each family is a path, with the TCP frontends of all Services:
    default/kubernetes first, then those without session affinity. With `named`, each frontend of these
    Services is a path.

    Raises NotFound if a named Service does not exist.
    """
    found: Paths = {}
    wanted = {target.asked for request in named for target in targets(request, situation)}
    for served in sorted(situation.frontends.values(), key=_preference):
        frontend = served.frontend
        if served.plan.name not in wanted if named else frontend.frontend.protocol is not Protocol.TCP:
            continue
        for address in _addresses(situation, origin, served):
            destination = Destination(address, frontend.frontend.port, frontend.frontend.protocol)
            of = family(address)
            key = PathKey(
                *(frontend.kind, of, address == loopback(of), frontend.restricted),
                destination if named else None,
            )
            found.setdefault(key, []).append(destination)
    return found


def _preference(served: Served) -> tuple[bool, bool, ServicePortName, int]:
    name = served.plan.name
    is_api = (name.namespace, name.name) == API_SERVER
    return not is_api, bool(served.plan.affinity_timeout), name, served.frontend.frontend.port


def _addresses(situation: Situation, origin: Origin, served: Served) -> Iterator[Address]:
    """The addresses at which this client would connect to a frontend."""
    frontend = served.frontend.frontend
    if served.frontend.kind is not FrontendKind.NODE_PORT:
        # Nothing outside has a route to a ClusterIP.
        if origin.kind is not ClientClass.OUTSIDE or served.frontend.kind is not FrontendKind.CLUSTER_IP:
            yield frontend.address
        return
    of = family(frontend.address)
    if origin.kind is ClientClass.OUTSIDE:
        device = situation.device(origin.ifindex)
        yield from [
            each
            for each in (device.addresses if device else ())
            if family(each) is of and situation.accepts_node_ports(each)
        ][:1]
        return
    if own := node_port_address(situation, frontend):
        yield own
    if origin.kind is ClientClass.NODE:
        yield loopback(of)
