"""The situation as the maps of mode ebpf hold it: in the kernel, or in a saved dump.

The maps have the results of the plan, not its input. So endpoints that no list has are known only while they
drain, and only as "not listed".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.inspect.device_view import DeviceRow
from ebpfproxy.backends.ebpf.inspect.view import DumpView, EndpointRow, ServiceRow
from ebpfproxy.diagnose.explain.origin import EBPF
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    Protocol,
    family,
    parse_address,
    parse_network,
    unspecified,
)
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.service import NamespacedName, ServicePortName
from ebpfproxy.plan.balancing import PlannedBalancing
from ebpfproxy.plan.service_plan import (
    DevicePlan,
    DeviceRole,
    Frontend,
    FrontendKind,
    FrontendPlan,
    NodePlan,
    NoEndpointAction,
    PlanContext,
    PlannedEndpoint,
    PlannedEndpoints,
    PolicyResult,
    Scope,
    ServicePortPlan,
    SocketLb,
)

LOOPBACK_DEVICE = "lo"
THIS_NODE = "here"
"""In `EndpointRow.tunnel`."""


def situation_of(view: DumpView, node_name: str) -> Situation:
    """Return the situation that the maps describe. Raises ConfigError if a saved dump lacks a section.

    Frontends of kinds or protocols that this version does not know are left out.
    """
    networks = view.networks()
    device_rows = view.devices()
    plans = {plan.key: plan for plan in _plans(view)}
    requested: dict[NamespacedName, tuple[ServicePortPlan, ...]] = {}
    for plan in plans.values():
        name = NamespacedName(plan.name.namespace, plan.name.name)
        requested[name] = (*requested.get(name, ()), plan)
    local = frozenset(parse_network(row.network) for row in networks if row.local)
    return Situation(
        EBPF,
        ClusterState({}, {}, None, local),
        PlanContext(node_name, socket_lb=_socket_lb(view, device_rows)),
        NodePlan(
            local,
            frozenset(parse_network(row.network) for row in networks if row.node_ports),
            tuple(map(_device, device_rows)),
            service_cidrs=frozenset(parse_network(row.network) for row in networks if row.service_cidr),
            foreign_networks=frozenset(
                parse_network(row.network)
                for row in networks
                if not (row.local or row.node_ports or row.service_cidr)
            ),
        ),
        plans,
        requested,
        is_from_tables=True,
    )


def _socket_lb(view: DumpView, devices: Sequence[DeviceRow]) -> SocketLb:
    """Return the value of --socket-lb.

    HOST is taken for OFF if there are SCTP Services: then loopback has a program in both cases.
    """
    settings = {row.setting: row.value for row in view.settings()}
    if settings.get("flags", 0) & abi.NODE_SOCKETS_OF_PODS:
        return SocketLb.ON
    return SocketLb.OFF if any(row.device == LOOPBACK_DEVICE for row in devices) else SocketLb.HOST


def _device(row: DeviceRow) -> DevicePlan:
    addresses = list(map(parse_address, row.masquerade))
    role = {"pod": DeviceRole.POD, "guest": DeviceRole.GUEST}.get(row.role, DeviceRole.UPLINK)
    if row.device == LOOPBACK_DEVICE:
        role = DeviceRole.LOOPBACK
    return DevicePlan(
        row.ifindex,
        row.device,
        role,
        row.link == "ip",
        _first(addresses, Family.IPV4),
        _first(addresses, Family.IPV6),
    )


def _first(addresses: Iterable[Address], of: Family) -> Address | None:
    return next((address for address in addresses if family(address) is of), None)


def _plans(view: DumpView) -> Iterator[ServicePortPlan]:
    by_id: dict[int, list[ServiceRow]] = {}
    for row in view.services():
        if row.kind in _KINDS and row.protocol in Protocol.__members__:
            by_id.setdefault(row.id, []).append(row)
    endpoints: dict[int, list[EndpointRow]] = {}
    for endpoint in view.endpoints():
        endpoints.setdefault(endpoint.service_id, []).append(endpoint)
    ranges: dict[int, list[Network]] = {}
    for range_ in view.ranges():
        ranges.setdefault(range_.service_id, []).append(parse_network(range_.network))
    for id_, rows in by_id.items():
        yield _plan(rows, endpoints.get(id_, []), tuple(ranges.get(id_, ())))


def _plan(
    rows: Sequence[ServiceRow], endpoints: Sequence[EndpointRow], ranges: tuple[Network, ...]
) -> ServicePortPlan:
    first = rows[0]
    of = _family(rows, endpoints)
    planned = sorted(
        (
            PlannedEndpoint(
                parse_address(each.address),
                each.port,
                "cluster" in each.lists,
                "local" in each.lists,
                each.on_node,
            ),
            each.weight,
            None if each.tunnel in ("", THIS_NODE) else parse_address(each.tunnel),
        )
        for each in endpoints
    )
    weights = tuple(weight for _, weight, _ in planned)
    balancing = PlannedBalancing(
        _algorithm(first),
        weights if any(each > 1 for each in weights) else (),
        first.slow_start,
        tunnels=tuple(tunnel for *_, tunnel in planned) if any(each.tunnel for each in endpoints) else (),
    )
    return ServicePortPlan(
        _name(first),
        of,
        tuple(_frontend(row, of, ranges) for row in rows),
        PlannedEndpoints(each for each, *_ in planned),
        NoEndpointAction.REJECT if "reject" in first.flags else NoEndpointAction.DROP,
        first.affinity,
        balancing=balancing,
    )


def _algorithm(row: ServiceRow) -> Algorithm | None:
    """The algorithm of a frontend, None for the default or one of another version."""
    is_known = row.algorithm in {each.value for each in Algorithm}
    return Algorithm(row.algorithm) if is_known and row.algorithm != Algorithm.RANDOM.value else None


def _family(rows: Sequence[ServiceRow], endpoints: Sequence[EndpointRow]) -> Family:
    """Return the family of a ServicePort. In a dump of an earlier version, a NodePort shows none; it is IPv4
    if nothing else shows it."""
    for row in rows:
        if row.family:
            return Family(row.family)
    texts = [row.address for row in rows if row.address != "*"] + [each.address for each in endpoints]
    return family(parse_address(texts[0])) if texts else Family.IPV4


def _name(row: ServiceRow) -> ServicePortName:
    namespace, _, rest = row.service.partition("/")
    name, _, port = rest.partition(":")
    return ServicePortName(namespace, name, port, Protocol[row.protocol])


def _frontend(row: ServiceRow, of: Family, ranges: tuple[Network, ...]) -> FrontendPlan:
    internal, _, external = row.policy.partition("/")
    address = unspecified(of) if row.address == "*" else parse_address(row.address)
    is_restricted = "source-ranges" in row.flags
    return FrontendPlan(
        Frontend(address, row.port, Protocol[row.protocol]),
        _KINDS[row.kind],
        _policy(internal, "masquerade-pod", row),
        _policy(internal, "masquerade-node", row),
        _policy(external or internal, "masquerade-outside", row),
        is_restricted,
        ranges if is_restricted else (),
        not is_restricted or "node-admitted" in row.flags,
    )


def _policy(policy: str, flag: str, row: ServiceRow) -> PolicyResult:
    return PolicyResult(Scope.LOCAL if policy == "Local" else Scope.CLUSTER, flag in row.flags)


_KINDS: Mapping[str, FrontendKind] = {
    name: FrontendKind(name) for name in abi.KINDS.values() if name in {each.value for each in FrontendKind}
}
