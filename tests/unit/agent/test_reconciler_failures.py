"""Failed syncs and rejected entries: no change is lost, and everything else is served."""

import logging

import pytest

from ebpfproxy.agent.reconciler import NOT_SERVED, Reconciler, SyncResult
from ebpfproxy.backends.delta import Delta
from ebpfproxy.errors import KernelError, TableFull
from ebpfproxy.model.address import Protocol, parse_address
from ebpfproxy.plan.service_plan import Frontend
from tests.support.build import CONTEXT, service
from tests.support.fake_backend import Entry, FakeBackend, FakeKernel, Key
from tests.unit.agent.agent import API, WEB, WEB_SLICE, Agent, gone, key

# Failures


@pytest.mark.parametrize("after", range(6))
def test_a_failed_sync_loses_no_change(agent: Agent, after: int) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.plane.fail_next_apply(KernelError("no"), after)
    with pytest.raises(KernelError, match="no"):
        agent.sync(API, gone("web"))
    done = agent.sync()
    assert agent.served() == {"default/api"}
    assert done.drifted == 0  # we did that ourselves
    assert not agent.kernel.frontends.keys() - {Frontend(parse_address("10.96.0.2"), 80, Protocol.TCP)}


def test_holds_is_true_only_after_a_successful_sync(agent: Agent) -> None:
    assert not agent.reconciler.holds([key("web")])
    agent.sync(WEB, WEB_SLICE)
    assert agent.reconciler.holds([key("web")])
    assert not agent.reconciler.holds([key("web"), key("api")])
    agent.plane.fail_next_apply(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(API)
    assert not agent.reconciler.holds([key("web")])
    agent.sync()
    assert agent.reconciler.holds([key("web"), key("api")])
    agent.sync(gone("web"))
    assert not agent.reconciler.holds([key("web")])


def test_after_a_failure_the_kernel_is_read_back(agent: Agent) -> None:
    """After an error of apply the state of the kernel is unknown."""
    agent.sync(WEB, WEB_SLICE)
    agent.plane.fail_next_apply(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(API)
    agent.kernel.ports.clear()
    agent.kernel.frontends.clear()
    agent.sync()
    assert agent.served() == {"default/web", "default/api"}


def test_changes_after_a_failure_are_in_the_next_sync(agent: Agent) -> None:
    agent.sync(WEB)
    agent.plane.fail_next_apply(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(API)
    agent.sync(service("third", ips=["10.96.0.3"]), gone("web"))
    assert agent.served() == {"default/api", "default/third"}


def test_after_a_failed_read_the_next_sync_reads_again(agent: Agent) -> None:
    agent.plane.fail_next_read(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(WEB)
    assert agent.kernel.writes == []
    agent.sync()
    assert agent.served() == {"default/web"}


def test_after_a_failed_verification_the_next_sync_reads_again(agent: Agent) -> None:
    agent.sync(WEB)
    agent.kernel.ports.clear()
    agent.plane.fail_next_read(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(verify=True)
    agent.sync()
    assert agent.served() == {"default/web"}


def test_many_consecutive_failures_lose_no_change(agent: Agent) -> None:
    for number in range(1, 6):
        agent.plane.fail_next_apply(KernelError("no"), after=number)
        with pytest.raises(KernelError):
            agent.sync(service(f"s{number}", ips=[f"10.96.0.{number}"]))
    agent.sync()
    assert agent.served() == {f"default/s{number}" for number in range(1, 6)}


# Rejections


class Clinging(FakeBackend):
    """A backend that rejects every drop."""

    def apply(self, delta: Delta[Key, Entry]) -> dict[Key, KernelError]:
        rejected = dict(super().apply(Delta(delta.puts, frozenset())))
        return rejected | {key: KernelError("it clings") for key in delta.drops}


def test_a_rejected_drop_counts_only_as_rejected() -> None:
    agent, plane = Agent(), Clinging()
    plane.open()
    agent.reconciler = Reconciler(plane, CONTEXT)
    assert agent.sync(WEB, WEB_SLICE) == SyncResult(put=1, dropped=0, rejected=0, drifted=0)
    assert agent.sync(gone("web")) == SyncResult(put=0, dropped=0, rejected=1, drifted=0)


def small_agent(capacity: int) -> Agent:
    return Agent(FakeKernel(capacity))


def test_a_rejected_entry_is_retried_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    agent = small_agent(1)
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        assert agent.sync(WEB).rejected == 0
        assert agent.sync(API) == SyncResult(0, 0, 1, 0)
        assert agent.sync() == SyncResult(0, 0, 1, 0)
        assert agent.sync(verify=True) == SyncResult(0, 0, 1, 0)
        assert [record.getMessage() for record in caplog.records] == [NOT_SERVED]
        assert agent.served() == {"default/web"}
        agent.sync(gone("web"))
        assert agent.sync() == SyncResult(1, 0, 0, 0)
        assert agent.served() == {"default/api"}
        assert agent.sync() == SyncResult(0, 0, 0, 0)
        assert len(caplog.records) == 1


def test_a_rejection_that_recurs_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    agent = small_agent(1)
    agent.sync(WEB)
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        agent.sync(API)
        agent.sync(gone("api"))
        assert agent.sync() == SyncResult(0, 0, 0, 0)
        agent.sync(API)
    assert [record.getMessage() for record in caplog.records] == [NOT_SERVED] * 2


def test_a_rejection_is_logged_with_reason_and_hint(caplog: pytest.LogCaptureFixture) -> None:
    class Full(FakeBackend):
        def apply(self, delta):  # type: ignore[no-untyped-def]
            return dict.fromkeys(delta.puts, TableFull("map services is full", "raise the limit"))

    agent = Agent()
    agent.plane = Full(agent.kernel)
    agent.plane.open()
    agent.reconciler = Reconciler(agent.plane, CONTEXT)
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        agent.sync(WEB)
    values = caplog.records[0].__dict__["values"]
    assert values == {"reason": "map services is full", "hint": "raise the limit"}


def test_a_rejection_is_logged_again_only_if_the_kind_of_its_reason_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: while a map was full, each change logged a line, because the figures had changed."""
    agent = Agent()
    reasons = iter([("1 of 9", "slots"), ("2 of 9", "slots"), ("2 of 9", "endpoints"), ("3 of 9", "slots")])

    def apply(delta: Delta[Key, Entry]) -> dict[Key, KernelError]:
        figures, kind = next(reasons)
        return dict.fromkeys(delta.puts, TableFull(f"map {kind} is full: {figures}", kind=kind))

    agent.plane.apply = apply  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        agent.sync(WEB)
        for _ in range(3):
            agent.sync()
    logged = [record.__dict__["values"]["reason"] for record in caplog.records]
    assert logged == [
        "map slots is full: 1 of 9",
        "map endpoints is full: 2 of 9",
        "map slots is full: 3 of 9",
    ]


def test_the_plans_of_rejected_entries_are_known_after_each_sync() -> None:
    agent = small_agent(1)
    agent.sync(WEB)
    assert agent.reconciler.rejected() == frozenset()
    agent.sync(API)
    assert agent.reconciler.rejected() == {key("api")}
    other = service("other", ips=["10.96.0.3"])
    agent.sync(other)
    assert agent.reconciler.rejected() == {key("api"), key("other")}
    agent.sync(service("api", ips=["10.96.0.4"]))
    assert agent.reconciler.rejected() == {key("api"), key("other")}
    agent.sync(gone("other"))
    assert agent.reconciler.rejected() == {key("api")}
    agent.sync(other)
    assert agent.reconciler.rejected() == {key("api"), key("other")}
    agent.sync(gone("web"))
    agent.sync(gone("api"))
    agent.sync()
    assert agent.reconciler.rejected() == frozenset()


def test_a_rejected_change_keeps_the_previous_entry_and_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    agent = small_agent(2)
    agent.sync(WEB, API)
    grown = service("web", ips=["10.96.0.1"], external=["203.0.113.1"])
    assert agent.sync(grown).rejected == 1
    assert agent.kernel.ports.keys() == {key("web"), key("api")}
    assert len(agent.kernel.frontends) == 2
    agent.sync(gone("api"))
    agent.sync()
    assert len(agent.kernel.frontends) == 2
    assert {owner for owner, _ in agent.kernel.frontends.values()} == {key("web")}


def test_a_rejected_entry_is_retried_without_reading_the_kernel() -> None:
    agent = small_agent(1)
    agent.sync(WEB)
    agent.sync(API)
    agent.sync(gone("web"))
    agent.plane.fail_next_read(KernelError("reading is slow"))
    assert agent.sync() == SyncResult(1, 0, 0, 0)
    assert agent.served() == {"default/api"}


def test_a_rejected_service_regains_a_lost_frontend_after_its_change_is_reverted() -> None:
    """The kernel kept its previous entry, except for the frontend that another Service took."""
    agent = small_agent(3)
    a, b = service("a", ips=["10.96.0.1"], external=["203.0.113.1"]), service("b", ips=["10.96.0.2"])
    agent.sync(a, b)
    moved = service("a", ips=["10.96.0.1"], external=["203.0.113.2"])
    taking = service("b", ips=["10.96.0.2"], external=["203.0.113.1"])
    frontend = Frontend(parse_address("203.0.113.1"), 80, Protocol.TCP)
    assert agent.sync(moved, taking).rejected == 1
    assert agent.kernel.frontends[frontend][0] == key("b")
    assert agent.sync(a, b).rejected == 0
    assert agent.kernel.frontends[frontend][0] == key("a")
