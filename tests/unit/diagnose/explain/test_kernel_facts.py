"""The differences of a mode's entries that concern one connection."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from ebpfproxy.backends.difference import DIFFERENT, MISSING, UNEXPECTED, Difference
from ebpfproxy.diagnose.explain.kernel_facts import KernelFacts
from ebpfproxy.diagnose.explain.result import Destination
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan
from tests.support.build import endpoint, service, slice_of
from tests.unit.diagnose.explain.scene import A_CLIENT, A_POD, CLUSTER_IP, explained, situation, to

WEB, API = service(), service("api", ips=["10.96.0.11"])
RUNS_AFTER = Difference("device eth0 ingress", DIFFERENT, "runs after other")
SLICES = (slice_of("web", endpoint()), slice_of("api", endpoint()))


class Inspection:
    """A mode with one entry for each ServicePort, the number of its endpoints. `actual` is the kernel."""

    def __init__(self, actual: Mapping[str, object], further: Iterable[Difference] = ()) -> None:
        self.actual = actual
        self._further = list(further)

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[str, int]:
        return {f"chain {plan.name}": len(plan.endpoints) for plan in plans}

    def read(self) -> Mapping[str, object]:
        return self.actual

    def shown(self, key: str, entry: object) -> Any:
        return entry

    def further(self) -> list[Difference]:
        return self._further


def differences(
    actual: Mapping[str, object],
    *further: Difference,
    of: Situation | None = None,
    destination: Destination | None = None,
    origin: Any = A_POD,
) -> list[str]:
    of = of or situation(WEB, API, *SLICES, mode="nftables")
    facts = KernelFacts(Inspection(actual, further), of)  # type: ignore[arg-type]
    return facts.differences(explained(of, destination, origin), origin)


def test_equal_entries_have_no_differences() -> None:
    assert not differences({"chain default/web": 1, "chain default/api": 1})


def test_only_the_entries_of_the_service_port_count() -> None:
    assert differences({"chain default/web": 2}) == ["chain default/web: different: have 2; want 1"]
    assert differences({"chain default/api": 1}) == ["chain default/web: missing"]


def test_an_unexpected_entry_counts_if_it_names_the_address_or_the_service() -> None:
    good = {"chain default/web": 1, "chain default/api": 1}
    assert differences({**good, f"element {CLUSTER_IP} . tcp . 80": 1, "element 10.9.9.9": 1}) == [
        f"element {CLUSTER_IP} . tcp . 80: unexpected"
    ]
    assert differences({**good, "element 10.97.0.1 . tcp . 80": 1}, destination=to("10.97.0.1")) == [
        "element 10.97.0.1 . tcp . 80: unexpected"
    ]


def test_an_unexpected_entry_of_a_longer_address_or_name_does_not_count() -> None:
    good = {"chain default/web": 1, "chain default/api": 1}
    longer = (f"element {CLUSTER_IP}0 . tcp . 80", f"element 1{CLUSTER_IP} . tcp . 80", "chain default/web-2")
    for each in longer:
        assert not differences({**good, each: 1})


def test_a_missing_hook_counts_for_the_sockets_that_run_it() -> None:
    of = situation(WEB, API, *SLICES)
    good = {"chain default/web": 1, "chain default/api": 1}
    hook = Difference("connect4", MISSING)
    assert differences(good, hook, of=of) == ["connect4: missing"]
    assert not differences(good, hook, of=of, origin=A_CLIENT)


def test_an_unexpected_entry_counts_if_it_has_the_frontend() -> None:
    frontend = f"ClusterIP {CLUSTER_IP}:81/TCP flags 0"
    actual = {"chain default/web": 1, "chain default/api": 1, "chain default/old": frontend}
    assert differences(actual, destination=to(port=81)) == [f"chain default/old: unexpected: {frontend}"]
    assert not differences(actual, destination=to("10.96.0.1", 81))


@pytest.mark.parametrize("difference", [Difference("device eth0", MISSING), RUNS_AFTER])
def test_a_device_counts_for_the_packets_that_it_handles(difference: Difference) -> None:
    of = situation(WEB, API, *SLICES)
    good = {"chain default/web": 1, "chain default/api": 1}
    others = (Difference("device eth01", UNEXPECTED), Difference("device eth0 egress", MISSING))
    assert differences(good, difference, *others, of=of, origin=A_CLIENT) == [str(difference)]
    assert not differences(good, difference, *others, of=of, origin=A_POD)  # a socket hook
