"""The differences of a mode's entries that concern one connection."""

from collections.abc import Iterable, Mapping
from typing import Any

from ebpfproxy.backends.difference import MISSING, Difference
from ebpfproxy.diagnose.explain.kernel_facts import KernelFacts
from ebpfproxy.diagnose.explain.result import Destination
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan
from tests.support.build import endpoint, service, slice_of
from tests.unit.diagnose.explain.scene import A_CLIENT, A_POD, CLUSTER_IP, explained, situation, to

WEB, API = service(), service("api", ips=["10.96.0.11"])
SLICES = (slice_of("web", endpoint()), slice_of("api", endpoint()))


class Inspection:
    """A mode with one entry for each ServicePort, the number of its endpoints. `actual` is the kernel."""

    def __init__(self, actual: Mapping[str, int], further: Iterable[Difference] = ()) -> None:
        self.actual = actual
        self._further = list(further)

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[str, int]:
        return {f"chain {plan.name}": len(plan.endpoints) for plan in plans}

    def read(self) -> Mapping[str, int]:
        return self.actual

    def shown(self, key: str, entry: int) -> Any:
        return entry

    def further(self) -> list[Difference]:
        return self._further


def differences(
    actual: Mapping[str, int],
    *further: Difference,
    of: Situation | None = None,
    destination: Destination | None = None,
    origin: Any = A_POD,
) -> list[str]:
    of = of or situation(WEB, API, *SLICES, mode="nftables")
    facts = KernelFacts(Inspection(actual, further), of)  # type: ignore[arg-type]
    return facts.differences(explained(of, destination, origin))


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


def test_a_missing_hook_counts_for_the_sockets_that_run_it() -> None:
    of = situation(WEB, API, *SLICES)
    good = {"chain default/web": 1, "chain default/api": 1}
    hook = Difference("connect4", MISSING)
    assert differences(good, hook, of=of) == ["connect4: missing"]
    assert not differences(good, hook, of=of, origin=A_CLIENT)
