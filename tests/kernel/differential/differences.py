"""The differences of the modes from tests/support/reference.py, and their reasons. `backends/behavior.py` has
the modes of most. "As in kube-proxy" means that kube-proxy's mode of the same name does the same. All other
differences are errors.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ebpfproxy.backends.behavior import BEHAVIOR, Behavior, NodePortInstead, Unused
from ebpfproxy.model.address import Family, Protocol, contains, parse_network
from tests.kernel.cluster import SERVICE_CIDRS
from tests.kernel.differential.conftest import SUBJECTS
from tests.kernel.differential.expected import Case, by_reference
from tests.support.reference import FlowsEnd, Reached


class Difference(NamedTuple):
    """The outcome of some cases of some subjects that differs from the reference, and why.

    `when` and `then` get the outcome by the reference and by the earlier entries.
    """

    modes: tuple[str, ...]
    why: str
    when: Callable[[Case, Reached], bool]
    then: Callable[[Case, Reached], Reached]


def _unmasqueraded(_: Case, it: Reached) -> Reached:
    return it._replace(targets=dict.fromkeys(it.targets, False))


def _masqueraded_elsewhere(case: Case, it: Reached) -> Reached:
    """Masqueraded on other nodes, and if an endpoint would reach itself."""
    targets = dict(it.targets)
    for target, masqueraded in it.targets.items():
        if masqueraded and target[0] != case.client.address:
            if target in case.local_targets:
                targets[target] = False
            elif target in case.unnamed_targets:
                targets[target] = None
    return it._replace(targets=targets)


def _as_outside(case: Case, it: Reached) -> Reached:
    targets = case.outside_targets
    return it._replace(targets={t: case.is_masqueraded or t[0] == case.client.address for t in targets})


def _lost_upon_itself(case: Case, it: Reached) -> Reached:
    others = {target: seen for target, seen in it.targets.items() if target[0] != case.client.address}
    return Reached(others, "drop")


def _refused(_case: Case, _it: Reached) -> Reached:
    return Reached({}, "reject")


def _silent(_case: Case, _it: Reached) -> Reached:
    return Reached({}, "drop")


def _of_node_port(case: Case) -> Reached:
    return by_reference(case._replace(claim=case.node_port))


def _to_node_port(case: Case, it: Reached) -> Reached:
    found = _of_node_port(case)
    return found if found.targets else it


def _as_node_port(case: Case, it: Reached) -> Reached:
    found = _of_node_port(case)
    return it if found.targets else found


def _by_chance(case: Case, it: Reached) -> Reached:
    found = _of_node_port(case)
    return it if found.targets or found.verdict == it.verdict else Reached({}, "either")


def _where(differs: Callable[[Behavior], bool]) -> tuple[str, ...]:
    """The subjects whose modes have this behavior."""
    return tuple(name for name, (mode, _) in SUBJECTS.items() if differs(BEHAVIOR[mode]))


def _with_node_port(*instead: NodePortInstead) -> tuple[str, ...]:
    return _where(lambda of: of.node_port_instead in instead)


_SERVICE_CIDRS = tuple(map(parse_network, SERVICE_CIDRS))
_IF_REJECTED, _IF_UNTRANSLATED = NodePortInstead.IF_REJECTED, NodePortInstead.IF_UNTRANSLATED

DIFFERENCES = (
    Difference(
        ("ebpf",),
        "A pod's socket connects to the endpoint directly: there is no packet to masquerade. "
        "If source ranges apply, packets are translated, as in the next entry.",
        lambda case, _: case.source == "pod" and not case.restricted,
        _unmasqueraded,
    ),
    Difference(
        _where(lambda of: not of.masquerades_here),
        "An endpoint on this node sees its client, since the reply passes this node anyway (decision 0011). "
        "One without a node name may see it: most pods' devices have no program.",
        lambda case, _: case.source != "node",
        _masqueraded_elsewhere,
    ),
    Difference(
        ("ebpf",),
        "Packets are dropped on devices, and packets of the node to itself pass none: if source ranges "
        "exclude the node from a load balancer address that it has itself, it reaches its own listener.",
        lambda case, it: case.source == "node" and case.is_own and it.verdict == "drop",
        _refused,
    ),
    Difference(
        _where(lambda of: not of.loopback),
        "NodePorts do not answer on 127.0.0.1 and ::1, as in kube-proxy: no packet to IPVS leaves the node "
        "from there.",
        lambda case, _: case.is_loopback,
        _refused,
    ),
    Difference(
        _where(lambda of: of.relays_loopback),
        "A relay serves TCP on 127.0.0.1 and ::1. Rules reject other protocols, as in kube-proxy (KEP-6032).",
        lambda case, _: case.is_loopback and case.protocol is not Protocol.TCP and case.kind == "NodePort",
        _refused,
    ),
    Difference(
        _where(lambda of: of.loopback == {Family.IPV4}),
        "NodePorts do not answer on ::1, as in kube-proxy: no packet leaves the node from there. If policy "
        "Local drops packets of external clients, it drops those to ::1, too.",
        lambda case, _: case.is_loopback and case.of is Family.IPV6,
        lambda case, it: _silent(case, it) if case.is_dropped_outside else _refused(case, it),
    ),
    Difference(
        _where(lambda of: of.unused_cluster_ips is Unused.PORTS_REJECTED),
        "An unused port of a ClusterIP is rejected, as in kube-proxy; otherwise routes decide.",
        lambda case, _: "ClusterIP" in case.neighbors,
        _refused,
    ),
    Difference(
        _where(lambda of: of.unused_cluster_ips is Unused.REJECTED),
        "An address of a ServiceCIDR that no Service has is rejected; otherwise routes decide.",
        lambda case, _: case.claim is None and any(contains(net, case.address) for net in _SERVICE_CIDRS),
        _refused,
    ),
    Difference(
        _where(lambda of: of.ranges_need_endpoints),
        "Without any endpoints source ranges do not apply: all clients are rejected. In mode iptables as in "
        "kube-proxy; nothing listens in mode userspace.",
        lambda case, _: case.restricted and case.is_without_endpoints,
        _refused,
    ),
    Difference(
        _where(lambda of: not of.rejects_external_of_node),
        "The node is not rejected at an external address without endpoints, as in kube-proxy: no such rule "
        "applies to its own packets, which are routed to the host that has the address.",
        lambda case, it: (
            case.source == "node"
            and it.verdict == "reject"
            and not case.is_own
            and case.kind in ("ExternalIP", "LoadBalancer")
        ),
        _silent,
    ),
    Difference(
        _with_node_port(_IF_REJECTED, _IF_UNTRANSLATED),
        "At an external address of the node without endpoints the NodePort of the same number answers, as in "
        "kube-proxy.",
        lambda case, it: it.verdict == "reject" and case.is_before_node_port,
        _to_node_port,
    ),
    Difference(
        _with_node_port(_IF_UNTRANSLATED),
        "The same applies to clients without endpoints by policy Local or by source ranges.",
        lambda case, it: it.verdict == "drop" and case.is_before_node_port,
        _to_node_port,
    ),
    Difference(
        _with_node_port(_IF_REJECTED),
        "If that NodePort has no endpoint either, it decides between rejecting and dropping, as in "
        "kube-proxy: NodePorts are looked up first at input.",
        lambda case, it: case.is_before_node_port and not it.targets and not case.is_kept_out,
        _as_node_port,
    ),
    Difference(
        _with_node_port(_IF_UNTRANSLATED),
        "There either one decides, as in kube-proxy: the one whose rule happens to be first.",
        lambda case, it: case.is_before_node_port and not it.targets and not case.is_kept_out,
        _by_chance,
    ),
    Difference(
        _where(lambda of: of.one_list),
        "A virtual server has one list for all clients, as in kube-proxy: if policy Local gives external "
        "clients endpoints on this node, pods and the node get only those, too.",
        lambda case, it: case.source != "outside" and bool(it.targets and case.outside_targets),
        _as_outside,
    ),
    Difference(
        _where(lambda of: of.has_addresses),
        "An unused port of a Service's address is rejected, in mode ipvs as in kube-proxy: the node has the "
        "address (decision 0068).",
        lambda case, _: bool(case.neighbors),
        _refused,
    ),
    Difference(
        ("ipvs",),
        "A pod that reaches itself gets no answer if the endpoint has no node name, as in kube-proxy: the "
        "ipset for this masquerade has only endpoints with this node's name.",
        lambda case, it: (
            not case.is_masqueraded
            and any(target[0] == case.client.address for target in it.targets)
            and not any(target[0] == case.client.address for target in case.local_targets)
        ),
        _lost_upon_itself,
    ),
    Difference(
        ("ipvs",),
        "UDP flows end with the real server, as in kube-proxy: once new flows would not get the endpoint.",
        lambda case, _: case.protocol is Protocol.UDP,
        lambda _, it: it._replace(flows_end=FlowsEnd.UNUSED),
    ),
    Difference(
        _with_node_port(NodePortInstead.IF_NOTHING_LISTENS),
        "At an external address of the node without any endpoints the NodePort of the same number listens.",
        lambda case, _: case.is_before_node_port and case.is_without_endpoints,
        lambda case, _: _of_node_port(case),
    ),
    Difference(
        _where(lambda of: of.by_relay),
        "A relay process connects to the endpoint, which sees an address of the node, never the client's.",
        lambda case, it: case.source != "node" and bool(it.targets),
        lambda _, it: it._replace(relayed=True),
    ),
    Difference(
        _where(lambda of: of.by_relay),
        "A UDP flow ends once its client would get no endpoint: the relay receives all datagrams of a "
        "frontend by one socket, which is then closed or has a filter that drops those of the client.",
        lambda case, _: case.protocol is Protocol.UDP,
        lambda _, it: it._replace(flows_end=FlowsEnd.WITHOUT_ANY),
    ),
)


def adapted(differences: Iterable[Difference], mode: str, case: Case, reached: Reached) -> Reached:
    """The reference's outcome, adapted to the known differences of this mode."""
    for each in differences:
        if mode in each.modes and each.when(case, reached):
            reached = each.then(case, reached)
    return reached
