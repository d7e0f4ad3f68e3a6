"""The same connection in the kernel: what the maps of mode ebpf hold, and where they differ from the plan."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from ebpfproxy.backends.ebpf.inspect.client_view import AffinityRow
from ebpfproxy.backends.ebpf.inspect.device_view import DeviceRow
from ebpfproxy.backends.ebpf.inspect.view import ServiceRow
from ebpfproxy.backends.firewall_checks import Dropping
from ebpfproxy.diagnose.explain.origin import Origin, address_of
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import ClientClass, Explanation, Step, Verdict, Via
from ebpfproxy.diagnose.situation import Served, Situation
from ebpfproxy.model.address import Family, contains, family, format_address, format_endpoint, is_unspecified
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.service_plan import DeviceRole, NoEndpointAction, PolicyResult, Scope


class Tables(Protocol):
    """The maps as tables: those in the kernel (`inspect.tables.View`), or a saved dump."""

    def services(self) -> Sequence[ServiceRow]: ...

    def affinity(self) -> Sequence[AffinityRow]: ...

    def devices(self) -> Sequence[DeviceRow]: ...


class ReadOnce:
    """Tables whose rows are read when they are first needed, and kept for all destinations."""

    def __init__(self, tables: Tables) -> None:
        self.services = functools.cache(tables.services)
        self.affinity = functools.cache(tables.affinity)
        self.devices = functools.cache(tables.devices)


def with_tables(
    explanation: Explanation,
    situation: Situation,
    origin: Origin,
    tables: Tables,
    further: Sequence[str] = (),
) -> Explanation:
    """Compare the explanation with the maps: frontend, endpoints, affinity and programs at devices.

    `further`: other differences.
    """
    if explanation.destination is None or explanation.destination.is_echo:
        return explanation
    explanation = with_affinity(explanation, situation, origin, tables)
    rows = _rows(explanation, tables)
    differences = [
        *_frontend_differences(explanation, rows),
        *_device_differences(explanation, situation, origin, tables),
        *further,
    ]
    return with_facts(explanation, differences)


def with_affinity(
    explanation: Explanation, situation: Situation, origin: Origin, tables: Tables
) -> Explanation:
    """Add the endpoint that the client has by session affinity, if the Service has that."""
    found = _affinity_step(explanation, situation, origin, tables)
    if found is None:
        return explanation
    steps: list[Step] = []
    for step in explanation.steps:
        steps.append(step)
        if step.reason in (Reason.AFFINITY_BY_NETNS, Reason.AFFINITY_BY_ADDRESS):
            steps.append(found)
    return dataclasses.replace(explanation, steps=tuple(steps))


def with_firewall(
    explanation: Explanation, origin: Origin, situation: Situation, dropping: Callable[[], Dropping | None]
) -> Explanation:
    """Add what drops packets from outside to endpoints (`firewall_checks.dropping`), if that concerns the
    connection: a process of the node receives without FORWARD."""
    local = situation.state.local_networks
    is_forwarded = any(
        each.used and not any(contains(net, each.address) for net in local) for each in explanation.endpoints
    )
    is_packet = explanation.path is not None and explanation.path.via is Via.PACKET
    is_outside = origin.kind is ClientClass.OUTSIDE and explanation.verdict is Verdict.CONNECTS
    found = dropping() if is_outside and is_packet and is_forwarded else None
    if found is None:
        return explanation
    step = Step(Reason.FORWARD_DROPS, f"{Reason.FORWARD_DROPS.meaning}: {found}")
    steps = (*explanation.steps[:-1], step, explanation.steps[-1])
    return dataclasses.replace(explanation, steps=steps, is_blocked=found.is_certain)


def with_facts(explanation: Explanation, differences: Sequence[str]) -> Explanation:
    """Add the step of the comparison, before the outcome."""
    why = Reason.DISAGREES if differences else Reason.AGREES
    step = Step(why, why.meaning, tuple(differences))
    steps = (*explanation.steps[:-1], step, explanation.steps[-1])
    return dataclasses.replace(explanation, steps=steps, disagreements=tuple(differences))


def _rows(explanation: Explanation, tables: Tables) -> list[ServiceRow]:
    """Return the rows of the destination: of the exact address, and of the NodePort."""
    destination = explanation.destination
    assert destination
    assert destination.protocol
    texts = (format_address(destination.address), "*")
    return [
        row
        for row in tables.services()
        if row.address in texts and row.port == destination.port and row.protocol == destination.protocol.name
    ]


def _frontend_differences(explanation: Explanation, rows: list[ServiceRow]) -> list[str]:
    served = explanation.served
    assert explanation.destination
    address = format_address(explanation.destination.address)
    if served is None:
        exact = [row for row in rows if row.address == address]
        return [
            f"services {row.address}:{row.port}/{row.protocol}: only in the kernel, for {row.service}"
            for row in exact
        ]
    frontend = served.frontend.frontend
    wanted = "*" if is_unspecified(frontend.address) else format_address(frontend.address)
    key = f"services {wanted}:{frontend.port}/{frontend.protocol.name}"
    of_family = [row for row in rows if row.address == wanted and _is_of_family(row, served)]
    if not of_family:
        return [f"{key}: missing in the kernel"]
    return [f"{key}: {difference}" for difference in _row_differences(of_family[0], served)]


def _is_of_family(row: ServiceRow, served: Served) -> bool:
    """NodePorts of both families have the address "*". In a dump of an earlier version, only their endpoints
    show the family, if any."""
    if row.family:
        return row.family == served.plan.family.value
    listed = [*row.internal, *row.external]
    if row.address != "*" or not listed:
        return True
    return ("[" in listed[0]) is (served.plan.family is Family.IPV6)


def _row_differences(row: ServiceRow, served: Served) -> list[str]:
    plan, frontend = served
    found = []
    if row.service != str(plan.name):
        found.append(f"the kernel has it for {row.service}, the plan for {plan.name}")
    if row.kind != frontend.kind.value:
        found.append(f"kind {row.kind}, the plan has {frontend.kind.value}")
    for name, listed, policy in (
        ("internal", row.internal, frontend.pod),
        ("external", row.external, frontend.outside),
    ):
        found += _list_differences(name, listed, served, policy)
    if row.affinity != plan.affinity_timeout:
        found.append(f"affinity {row.affinity} s, the plan has {plan.affinity_timeout} s")
    algorithm = (plan.balancing.algorithm or Algorithm.RANDOM).value
    if row.algorithm != algorithm:
        found.append(f"algorithm {row.algorithm}, the plan has {algorithm}")
    if ("reject" in row.flags) is not (plan.no_endpoint_action is NoEndpointAction.REJECT):
        found.append("another no-endpoint action than in the plan")
    if ("source-ranges" in row.flags) is not frontend.restricted:
        found.append("source ranges apply in only one of kernel and plan")
    return found


def _list_differences(name: str, listed: list[str], served: Served, policy: PolicyResult) -> list[str]:
    is_local = policy.scope is Scope.LOCAL
    wanted = {
        format_endpoint(each.address, each.port)
        for each in served.plan.endpoints
        if (each.local if is_local else each.cluster)
    }
    extra, lacking = sorted(set(listed) - wanted), sorted(wanted - set(listed))
    differences = []
    if extra:
        differences.append(f"{name} endpoints only in the kernel: {', '.join(extra)}")
    if lacking:
        differences.append(f"{name} endpoints only in the plan: {', '.join(lacking)}")
    return differences


def _device_differences(
    explanation: Explanation, situation: Situation, origin: Origin, tables: Tables
) -> list[str]:
    """Return the devices that the packet path needs and that lack a program."""
    path = explanation.path
    if path is None or path.via is not Via.PACKET:
        return []
    rows = {row.ifindex: row for row in tables.devices()}
    if origin.kind is ClientClass.POD:
        needed = [each for each in situation.node.devices if each.name == origin.interface]
    else:
        roles = (DeviceRole.UPLINK, DeviceRole.TUNNEL)
        needed = [each for each in situation.node.devices if each.role in roles]
    side = "egress" if origin.kind is ClientClass.NODE else "ingress"
    differences = []
    for device in needed:
        row = rows.get(device.ifindex)
        if row is None or not getattr(row, side):
            differences.append(f"device {device.name}: no program at {side}")
        else:
            differences += [
                f"device {device.name}: another program runs first: {name}" for name in row.before
            ]
    return differences


def _affinity_step(
    explanation: Explanation, situation: Situation, origin: Origin, tables: Tables
) -> Step | None:
    served, path = explanation.served, explanation.path
    if served is None or path is None or explanation.destination is None or not served.plan.affinity_timeout:
        return None
    client = f"netns {origin.cookie}"
    if Reason.AFFINITY_BY_NETNS not in {each.reason for each in explanation.steps}:
        address = address_of(origin, situation, family(explanation.destination.address))
        client = format_address(address) if address else ""
    usable = {str(each) for each in explanation.endpoints if each.used}
    for row in tables.affinity():
        if row.service == str(served.plan.name) and row.client == client and row.endpoint in usable:
            text = f"{Reason.AFFINITY_KNOWN.meaning}: {row.endpoint}, last used {row.age:.0f} s ago"
            return Step(Reason.AFFINITY_KNOWN, text)
    return Step(Reason.AFFINITY_UNKNOWN, Reason.AFFINITY_UNKNOWN.meaning)
