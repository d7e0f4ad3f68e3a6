"""Entries in the kernel that this run did not write: of a previous run, and of other programs."""

import logging

import pytest

from ebpfproxy.agent.reconciler import REPAIRED, Reconciler, SyncResult
from ebpfproxy.api.event import NodeChanged
from ebpfproxy.backends.delta import Delta
from ebpfproxy.errors import KernelError
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import ServicePortPlan
from tests.support.build import CONTEXT, endpoint, node, slice_of
from tests.support.fake_backend import Entry, FakeBackend, FakeKernel, Key
from tests.unit.agent.agent import API, API_SLICE, LOCAL, WEB, WEB_SLICE, Agent, gone, key

# Leftovers of a previous run


class Counted(FakeBackend):
    """A backend that counts the deltas that it applies."""

    deltas = 0

    def apply(self, delta):  # type: ignore[no-untyped-def]
        self.deltas += 1
        return super().apply(delta)


class CountedAgent(Agent):
    plane: Counted

    def __init__(self, kernel: FakeKernel | None = None) -> None:
        super().__init__(kernel)
        self.plane = Counted(self.kernel)
        self.plane.open()
        self.reconciler = Reconciler(self.plane, CONTEXT)


def test_leftovers_of_a_previous_run_are_returned_once() -> None:
    first = Agent()
    first.sync(WEB, API, NodeChanged(node()), LOCAL)
    again = Agent(first.kernel)
    again.sync(WEB, NodeChanged(node()), LOCAL)
    left = again.reconciler.take_leftovers()
    assert {str(each[0]) for each in left if isinstance(each[0], ServicePortName)} == {"default/api"}
    assert not again.reconciler.take_leftovers()
    again.sync(gone("web"))
    assert not again.reconciler.take_leftovers()


def test_leftovers_are_returned_even_if_a_failed_sync_removed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Agent()
    first.sync(WEB, API, NodeChanged(node()), LOCAL)
    again = Agent(first.kernel)
    apply = FakeBackend.apply

    def apply_and_fail(plane: FakeBackend, delta: Delta[Key, Entry]) -> None:
        apply(plane, delta)
        raise KernelError("only half of it is known")

    with monkeypatch.context() as failing:
        failing.setattr(FakeBackend, "apply", apply_and_fail)
        with pytest.raises(KernelError):
            again.sync(WEB, NodeChanged(node()), LOCAL)
    again.sync()
    assert again.reconciler.take_leftovers()


def test_after_a_restart_without_changes_an_empty_delta_is_applied() -> None:
    before = CountedAgent()
    before.sync(WEB, WEB_SLICE, LOCAL, verify=True)
    again = CountedAgent(before.kernel)
    assert again.sync(WEB, WEB_SLICE, LOCAL, verify=True) == SyncResult(0, 0, 0, 0)
    assert again.plane.deltas == 1
    assert again.kernel.writes == []


def test_a_sync_without_changes_or_verification_does_not_call_the_backend() -> None:
    agent = CountedAgent()
    agent.sync(WEB)
    agent.sync()
    assert agent.plane.deltas == 1


def test_leftovers_of_a_previous_run_are_dropped_in_the_first_sync(agent: Agent) -> None:
    agent.sync(WEB, API, WEB_SLICE)
    again = Agent(agent.kernel)
    done = again.sync(WEB, WEB_SLICE)
    assert (done.put, done.dropped, done.drifted) == (0, 1, 0)
    assert again.served() == {"default/web"}
    assert agent.kernel.writes == [("drop", key("api"))]


# Changes by other programs


def test_without_external_changes_none_are_reported(agent: Agent) -> None:
    assert not agent.reconciler.is_modified_externally()
    agent.sync(WEB, WEB_SLICE)
    agent.sync(API)
    assert not agent.reconciler.is_modified_externally()


def test_an_external_change_is_reported_until_a_sync_verifies(
    agent: Agent,
) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.kernel.ports.clear()
    assert agent.reconciler.is_modified_externally()
    agent.sync(verify=True)
    assert not agent.reconciler.is_modified_externally()


def test_an_external_change_is_still_reported_after_a_sync_that_writes(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.kernel.ports.clear()
    agent.sync(API)
    assert agent.reconciler.is_modified_externally()
    agent.sync()
    assert agent.reconciler.is_modified_externally()
    agent.sync(verify=True)
    assert not agent.reconciler.is_modified_externally()


def test_an_external_change_is_still_reported_after_an_empty_sync(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.kernel.ports.clear()
    agent.sync()
    assert agent.reconciler.is_modified_externally()


def test_external_changes_are_counted_and_restored(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.sync(WEB, API, WEB_SLICE, API_SLICE, LOCAL)
    agent.kernel.networks.clear()
    del agent.kernel.ports[key("web")]
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        assert agent.sync().drifted == 0  # not looked for
        done = agent.sync(verify=True)
        assert agent.sync(verify=True).drifted == 0
    assert done.drifted == 3
    assert agent.served() == {"default/web", "default/api"}
    assert set(agent.kernel.networks) == LOCAL.networks
    assert [record.getMessage() for record in caplog.records] == [REPAIRED]


def test_a_change_by_the_agent_is_not_drift(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    done = agent.sync(API, slice_of("web", endpoint("10.1.0.9")), verify=True)
    assert done == SyncResult(put=2, dropped=0, rejected=0, drifted=0)


def test_the_first_sync_and_one_after_a_failure_report_no_drift(agent: Agent) -> None:
    first = Agent(FakeKernel(ports={key("x"): ServicePortPlan(*key("x"), (), (), no_endpoint_action=None)}))  # type: ignore[arg-type]
    assert first.sync(WEB, verify=True).drifted == 0
    agent.sync(WEB)
    agent.plane.fail_next_apply(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(API)
    assert agent.sync(verify=True).drifted == 0
