"""All dataplanes side by side: what clients reach through random histories of Services is what Kubernetes'
rules say, worked out by tests/support/reference.py, but for the differences that are written here.

Each history begins with what the one before it left.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ebpfproxy.model.address import Family
from tests.kernel.differential.course import Course
from tests.kernel.differential.expected import Case, by_reference
from tests.kernel.differential.history import Step, histories, history_of_differences
from tests.kernel.differential.subject import Subject
from tests.support.reference import Reached

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]


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
    here = case.local_targets - {target for target in it.targets if target[0] == case.client.address}
    return it._replace(targets={target: at and target not in here for target, at in it.targets.items()})


def _refused(_case: Case, _it: Reached) -> Reached:
    return Reached({}, "reject")


def _silent(_case: Case, _it: Reached) -> Reached:
    return Reached({}, "drop")


def _by_node_port(case: Case, it: Reached) -> Reached:
    found = by_reference(case._replace(claim=case.node_port))
    return found if found.targets else it


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
        "An endpoint on this node sees its client, whose reply comes by this node anyway (decision 0011).",
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
        lambda case, _: case.is_unused_cluster_ip,
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
        _by_node_port,
    ),
    Difference(
        _IPTABLES,
        "So it does for those whom policy Local or source ranges leave nothing.",
        lambda case, it: it.verdict == "drop" and case.is_before_node_port,
        _by_node_port,
    ),
)


def adapted(differences: Iterable[Difference], mode: str, case: Case, reached: Reached) -> Reached:
    """What the reference says, as this mode is known to do it."""
    for each in differences:
        if mode in each.modes and each.when(case, reached):
            reached = each.then(case, reached)
    return reached


def test_clients_reach_what_the_reference_says(
    subjects: tuple[Subject, ...], pytestconfig: pytest.Config
) -> None:
    course = Course(subjects, functools.partial(adapted, DIFFERENCES))

    @settings(
        max_examples=pytestconfig.getoption("histories", 15),
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(histories())
    def follow(history: tuple[Step, ...]) -> None:
        course.run(history)

    follow()


def test_a_history_that_meets_all_differences(subjects: tuple[Subject, ...]) -> None:
    Course(subjects, functools.partial(adapted, DIFFERENCES)).run(history_of_differences())


@pytest.mark.parametrize("number", range(len(DIFFERENCES)), ids=lambda number: DIFFERENCES[number].why[:50])
def test_each_difference_is_one(subjects: tuple[Subject, ...], number: int) -> None:
    """Without its line the history above is not as expected, in each of its modes."""
    others = DIFFERENCES[:number] + DIFFERENCES[number + 1 :]
    for subject in subjects:
        if subject.name in DIFFERENCES[number].modes:
            course = Course([subject], functools.partial(adapted, others))
            with pytest.raises(AssertionError, match=f"{subject.name}, "):
                course.run(history_of_differences())
