"""What modes do otherwise than tests/support/reference.py has it, and why: "as in kube-proxy" where its mode
of that name does the same. Whatever else a mode does in its own way is wrong.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ebpfproxy.model.address import Family, Protocol
from tests.kernel.differential.expected import Case, by_reference
from tests.support.reference import Reached


class Difference(NamedTuple):
    """What the clients of some cases meet in some modes, other than by the reference, and why.

    `when` and `then` are given what the case's client meets by the reference and the lines above.
    """

    modes: tuple[str, ...]
    why: str
    when: Callable[[Case, Reached], bool]
    then: Callable[[Case, Reached], Reached]


def _unmasqueraded(_: Case, it: Reached) -> Reached:
    return it._replace(targets=dict.fromkeys(it.targets, False))


def _masqueraded_elsewhere(case: Case, it: Reached) -> Reached:
    """And where an endpoint would come upon itself."""
    targets = dict(it.targets)
    for target, masqueraded in it.targets.items():
        if masqueraded and target[0] != case.client.address:
            if target in case.local_targets:
                targets[target] = False
            elif target in case.unsaid_targets:
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


_EBPF, _IPTABLES = ("ebpf", "ebpf-off"), ("iptables", "iptables-nft")

DIFFERENCES = (
    Difference(
        ("ebpf",),
        "A pod's socket is sent to its endpoint when it connects: there is no packet to be masqueraded. "
        "Where source ranges count, and so packets do, it is as in the next line.",
        lambda case, _: case.source == "pod" and not case.restricted,
        _unmasqueraded,
    ),
    Difference(
        _EBPF,
        "An endpoint on this node sees its client, whose reply comes by this node anyway (decision 0011). "
        "One that does not say that it is here may do so: most pods' devices have no program.",
        lambda case, _: case.source != "node",
        _masqueraded_elsewhere,
    ),
    Difference(
        ("ebpf",),
        "What is dropped is dropped by its packets, and the node's to itself are not looked at: where source "
        "ranges keep it from a load balancer's address that is its own, it comes to whoever listens there.",
        lambda case, it: case.source == "node" and case.is_own and it.verdict == "drop",
        _refused,
    ),
    Difference(
        ("nftables",),
        "NodePorts do not answer on 127.0.0.1 and ::1, as in kube-proxy: it would need route_localnet.",
        lambda case, _: case.is_loopback,
        _refused,
    ),
    Difference(
        _IPTABLES,
        "NodePorts do not answer on ::1, as in kube-proxy: no packet leaves the node from there. What policy "
        "Local keeps from clients outside is dropped there, too.",
        lambda case, _: case.is_loopback and case.of is Family.IPV6,
        lambda case, it: _silent(case, it) if case.is_dropped_outside else _refused(case, it),
    ),
    Difference(
        ("nftables",),
        "A port of a ClusterIP that no Service has is refused, as in kube-proxy; else routes decide.",
        lambda case, _: "ClusterIP" in case.neighbors,
        _refused,
    ),
    Difference(
        _IPTABLES,
        "Without endpoints anywhere source ranges do not count, as in kube-proxy: everybody is refused.",
        lambda case, _: case.restricted and case.is_without_endpoints,
        _refused,
    ),
    Difference(
        _IPTABLES,
        "The node is not refused an external address without endpoints, as in kube-proxy: no such rule is in "
        "the way of what it sends, which goes to whoever has the address.",
        lambda case, it: (
            case.source == "node"
            and it.verdict == "reject"
            and not case.is_own
            and case.kind in ("ExternalIP", "LoadBalancer")
        ),
        _silent,
    ),
    Difference(
        (*_IPTABLES, "nftables"),
        "An external address that is the node's own, and without endpoints, gives way to the NodePort of "
        "that number, as in kube-proxy.",
        lambda case, it: it.verdict == "reject" and case.is_before_node_port,
        _to_node_port,
    ),
    Difference(
        _IPTABLES,
        "So it does for those whom policy Local or source ranges leave nothing.",
        lambda case, it: it.verdict == "drop" and case.is_before_node_port,
        _to_node_port,
    ),
    Difference(
        ("nftables",),
        "Where that NodePort has nobody either, it decides how that is said, as in kube-proxy: NodePorts are "
        "looked up first in what comes in.",
        lambda case, it: case.is_before_node_port and not it.targets and not case.is_kept_out,
        _as_node_port,
    ),
    Difference(
        _IPTABLES,
        "There the one or the other decides, as in kube-proxy: whose rule happens to be the first.",
        lambda case, it: case.is_before_node_port and not it.targets and not case.is_kept_out,
        _by_chance,
    ),
    Difference(
        ("ipvs",),
        "A virtual server has one list for all, as in kube-proxy: where policy Local gives clients outside "
        "endpoints on this node, pods and the node are given those, too.",
        lambda case, it: case.source != "outside" and bool(it.targets and case.outside_targets),
        _as_outside,
    ),
    Difference(
        ("ipvs",),
        "NodePorts do not answer on 127.0.0.1 and ::1, as in kube-proxy: nothing leaves the node from there.",
        lambda case, _: case.is_loopback,
        _refused,
    ),
    Difference(
        ("ipvs",),
        "On an address of a Service a port that none has is refused, as in kube-proxy: it is the node's.",
        lambda case, _: bool(case.neighbors),
        _refused,
    ),
    Difference(
        ("ipvs",),
        "A pod that comes upon itself has no answer where the endpoint does not say that it is here, as in "
        "kube-proxy: only those that do are in the ipset of who is masqueraded then.",
        lambda case, it: (
            not case.is_masqueraded
            and any(target[0] == case.client.address for target in it.targets)
            and not any(target[0] == case.client.address for target in case.local_targets)
        ),
        _lost_upon_itself,
    ),
    Difference(
        ("ipvs",),
        "UDP flows end with the real server, as in kube-proxy: when new ones would not get the endpoint.",
        lambda case, _: case.protocol is Protocol.UDP,
        lambda _, it: it._replace(ends_flows=True),
    ),
)


def adapted(differences: Iterable[Difference], mode: str, case: Case, reached: Reached) -> Reached:
    """What the reference says, as this mode is known to do it."""
    for each in differences:
        if mode in each.modes and each.when(case, reached):
            reached = each.then(case, reached)
    return reached
