"""After any history of events the kernel has only the last state."""

import contextlib
from collections.abc import Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.api.event import AddressesChanged, Event, NodeChanged, ServiceChanged, SliceChanged
from ebpfproxy.errors import KernelError
from ebpfproxy.model.service import NamespacedName
from tests.support.build import networks
from tests.support.examples import examples
from tests.support.fake_backend import FakeKernel
from tests.support.strategies import NODES, SERVICES, slices_of
from tests.unit.agent.agent import Agent


@st.composite
def events(draw: st.DrawFn) -> Event:
    kind = draw(st.integers(0, 9))
    if kind < 4:
        made = draw(SERVICES)
        return ServiceChanged(made.name, made if draw(st.integers(0, 3)) else None)
    if kind < 8:
        owner = draw(st.sampled_from([NamespacedName("default", n) for n in ("web", "api", "dns")]))
        piece = draw(slices_of(owner))
        return SliceChanged(piece.name, piece if draw(st.integers(0, 3)) else None)
    if kind == 8:
        return NodeChanged(draw(NODES))
    texts = draw(st.sets(st.sampled_from(("127.0.0.0/8", "192.0.2.10/32", "::1/128", "fd00::1/128"))))
    return AddressesChanged(frozenset(networks(texts)))


STEPS = st.sampled_from(("wait", "wait", "sync", "verify", "fail", "plan", "vandal"))


def state_events(events_: Iterable[Event]) -> list[Event]:
    """Return the last event of each object, in another order, and all of the Node: after its deletion, its
    addresses stay (`Tracker`)."""
    events_ = list(events_)
    of_node: list[Event] = [each for each in events_ if isinstance(each, NodeChanged)]
    last: dict[tuple[type, object], Event] = {}
    for event in events_:
        match event:
            case NodeChanged():
                continue
            case ServiceChanged(name_) | SliceChanged(name_):
                last[type(event), name_] = event
            case _:
                last[type(event), None] = event
    return [*reversed(last.values()), *of_node]


@given(
    st.lists(st.tuples(events(), STEPS), max_size=14),
    st.integers(0, 6),
)
@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow])
def test_after_any_history_the_kernel_equals_that_of_a_fresh_agent_with_the_last_state(
    history: list[tuple[Event, str]], fails_after: int
) -> None:
    agent = Agent()
    agent.plan()
    for event, step in history:
        agent.fold(event)
        if step == "plan":
            agent.plan()
        elif step == "vandal":
            agent.kernel.ports.clear()
            agent.sync(verify=True)
        elif step == "fail":
            agent.plane.fail_next_apply(KernelError("no"), fails_after)
            with contextlib.suppress(KernelError):  # none where nothing is to be written
                agent.sync()
            agent.plane.fail_next_apply(None)
        elif step in ("sync", "verify"):
            agent.sync(verify=step == "verify")
    agent.sync()
    fresh = Agent()
    fresh.sync(*state_events(event for event, _ in history))
    assert agent.plane.read() == fresh.plane.read()
    assert agent.sync(verify=True) == SyncResult(0, 0, 0, 0)
    sums = [
        (p.services, p.endpoints, tuple(p.no_local.items()), p.needing_pods, p.conflicts)
        for p in (agent.reconciler, fresh.reconciler)
    ]
    assert sums[0] == sums[1]


@given(st.lists(events(), max_size=10), st.integers(0, 5))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
def test_in_a_full_kernel_every_entry_is_as_desired_or_missing(history: list[Event], capacity: int) -> None:
    """A plan that does not fit leaves no wrong entry, and retries change nothing."""
    agent, roomy = Agent(FakeKernel(capacity)), Agent()
    for event in history:
        for each in (agent, roomy):
            each.sync(event)
    for _ in range(3):
        agent.sync()
    assert len(agent.kernel.frontends) <= capacity
    before = agent.plane.read()
    rejected = agent.sync(verify=True).rejected
    assert agent.plane.read() == before
    wanted = roomy.plane.read()
    assert len([k for k in wanted if before.get(k) != wanted[k]]) == rejected
