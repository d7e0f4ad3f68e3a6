"""Random histories of Services, with clients that never stop sending."""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from ebpfproxy.model.address import Address, parse_address
from ebpfproxy.model.endpoint import Endpoint
from ebpfproxy.plan.service_plan import PlanKey, ServicePortPlan
from ebpfproxy.plan.stale_flows import StaleFlows
from tests.support.build import endpoint
from tests.support.examples import examples
from tests.unit.plan.udp_flows import LOCAL, NODE, UDP, Flow, flow, gone, place, plan


class World:
    """Services, the rules in force, and the flows of clients that never stop sending.

    A client with an entry keeps it. A client without one gets it from the current rules. Stale entries are
    ended only when a search is requested.
    """

    def __init__(self) -> None:
        self.flows = StaleFlows()
        self.flows.expect_node_ports(frozenset(LOCAL))
        self.plans: dict[PlanKey, ServicePortPlan] = {}
        self.entries: dict[tuple[str, str], Flow] = {}  # by client and what it sends to
        self.foreign: set[tuple[str, str]] = set()

    def send(self, client: str, to: str, choice: int) -> None:
        key = client, to
        if key not in self.entries:
            targets = self._targets(to)
            if targets is None and choice == 0:  # a rule of another program
                self.entries[key] = flow(to, "10.9.9.9:99")
                self.foreign.add(key)
            elif targets:
                address, number = targets[choice % len(targets)]
                self.entries[key] = Flow(UDP, *place(to), address, number, True)
            else:
                self.entries[key] = flow(to)

    def change(self, changed: dict[PlanKey, ServicePortPlan | None]) -> None:
        self.flows.expect(changed)
        for key, each in changed.items():
            self.plans.pop(key, None)
            if each:
                self.plans[key] = each
        for of in self.flows.in_force():
            for sender in [sender for sender, entry in self.entries.items() if self.flows.is_stale(entry)]:
                assert sender not in self.foreign or self._targets(sender[1]) is not None
                del self.entries[sender]
                self.foreign.discard(sender)
            self.flows.forget_gone(of)

    def black_holes(self) -> Iterable[Flow]:
        """Yield entries that continue to an endpoint to which no current rule would send them."""
        for (client, to), entry in self.entries.items():
            targets = self._targets(to)
            answers = entry.reply_source, entry.reply_source_port
            if targets and answers not in targets:
                yield entry
            if not targets and entry.is_dnated and (client, to) not in self.foreign:
                yield entry

    def _targets(self, to: str) -> list[tuple[Address, int]] | None:
        """Return the endpoints of a frontend, None if there is no such frontend."""
        address, number = place(to)
        for wanted in (address, parse_address("0.0.0.0")):
            for each in self.plans.values():
                if any((f.frontend.address, f.frontend.port) == (wanted, number) for f in each.frontends):
                    return [(e.address, e.port) for e in each.endpoints]
        return None


ENDPOINTS = st.sets(st.integers(1, 3)).map(lambda some: [endpoint(f"10.1.0.{n}") for n in sorted(some)])
CHANGES = st.lists(
    st.tuples(st.integers(0, 1), st.none() | st.tuples(ENDPOINTS, st.sampled_from((0, 1)))),
    min_size=1,
    max_size=2,
    unique_by=lambda change: change[0],
)
SENT = st.sampled_from(["10.96.0.50:53", "10.96.0.51:53", f"{NODE}:30050", f"{NODE}:30051"])
SENDING = st.lists(st.tuples(st.sampled_from("ab"), SENT, st.integers(0, 3)), max_size=6)


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(CHANGES, SENDING), max_size=8))
def test_no_flow_keeps_a_wrong_endpoint_and_no_foreign_flow_is_ended(
    history: list[tuple[list[tuple[int, tuple[list[Endpoint], int] | None]], list[tuple[str, str, int]]]],
) -> None:
    world = World()
    for changes, sending in history:
        changed: dict[PlanKey, ServicePortPlan | None] = {}
        for number, wanted in changes:
            named, ips = f"s{number}", (f"10.96.0.5{number}",)
            if wanted is None:
                changed |= gone(plan(called=named, ips=ips))
            else:
                changed |= plan(*wanted[0], called=named, ips=ips, node_port=wanted[1] * (30050 + number))
        world.change(changed)
        assert list(world.black_holes()) == []
        for client, to, choice in sending:
            world.send(client, to, choice)
        assert list(world.black_holes()) == []
