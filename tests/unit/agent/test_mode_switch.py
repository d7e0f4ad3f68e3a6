"""Mode switches between fake modes: the order of steps, and the result of failures."""

import dataclasses
import errno
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import pytest

from ebpfproxy.agent import mode_cleanup, mode_switch
from ebpfproxy.agent.mode_switch import ModeSwitcher
from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.backends.selection import AUTO, Choice, Lack, choose
from ebpfproxy.config import Config
from ebpfproxy.errors import AlreadyExists, KernelError, ProgramRejected, Unsupported
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.model.address import Family
from ebpfproxy.model.cluster import ClusterState
from tests.support.build import endpoint, name, service, slice_of
from tests.support.fake_backend import Entry, FakeBackend, Key
from tests.support.modes import FakeMode

CONFIG = Config(hostname_override="here", proxy_mode="one")
OTHER = dataclasses.replace(CONFIG, proxy_mode="other")
WEB, SLICE = service("web"), slice_of("web", endpoint("10.1.0.1"))
STATE = ClusterState({WEB.name: WEB}, {WEB.name: (SLICE,)})


class FreeLock:
    """The lock of a network namespace that no other agent has."""

    def __init__(self, patience: float) -> None:
        pass

    def release(self) -> None:
        pass


class Node:
    """The mode switcher of an agent that has synced in mode one."""

    def __init__(self) -> None:
        self.one, self.other, self.third = FakeMode("one"), FakeMode("other"), FakeMode("third")
        self.metrics = Metrics()
        self.fallbacks: list[Mapping[str, str]] = []

    def start(self, *, synced: bool = True, config: Config = CONFIG) -> None:
        callbacks = Callbacks()
        self.switcher = ModeSwitcher(config, callbacks, self.metrics, self.fallbacks.append)
        self.switcher.open()
        self.switcher.serving.reconciler.plan(
            STATE, frozenset({name("web")}), node_changed=True, host_changed=True
        )
        if synced:
            self.switcher.sync(verify=True)

    def metric(self, wanted: str) -> float:
        found = (sample for family in self.metrics.registry.collect() for sample in family.samples)
        return sum(sample.value for sample in found if sample.name == wanted)


def gone(mode: FakeMode) -> None:
    """Wait until nothing of the mode is left in the kernel."""
    deadline = time.monotonic() + 10
    while mode.kernel.ports or not mode.drained:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node()
    modes = made.one, made.other, made.third

    def chosen(config: Config, failed: Mapping[str, Lack] = MappingProxyType({})) -> Choice:
        return choose(config, modes, failed)

    monkeypatch.setattr(mode_switch, "MODES", modes)
    monkeypatch.setattr(mode_switch, "choose", chosen)
    monkeypatch.setattr(mode_switch, "NamespaceLock", FreeLock)
    made.start()
    yield made
    made.switcher.close()


def test_an_outdated_plan_is_rendered_again_and_synced(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    plane, (key,) = node.one.plane, node.one.kernel.ports
    assert not node.switcher.is_modified_externally()
    node.one.outdated.add(key)
    (plan,) = node.switcher.serving.reconciler.plans.values()
    changed = dataclasses.replace(plan, affinity_timeout=7)
    monkeypatch.setattr(plane, "render", lambda plans, node: {each.key: changed for each in plans})
    assert node.switcher.is_modified_externally()
    node.one.outdated.clear()
    result = node.switcher.sync(verify=True)
    assert (result.put, result.drifted) == (1, 0)
    assert node.one.kernel.ports[key].affinity_timeout == 7
    assert not node.switcher.is_modified_externally()


def test_the_other_mode_has_all_entries_before_the_first_one_is_closed(node: Node) -> None:
    seen = []
    serving = node.switcher.serving
    close = serving.close

    def note_and_close() -> None:
        seen.append(len(node.other.kernel.ports))
        close()

    serving.close = note_and_close  # type: ignore[method-assign]
    node.switcher.follow(OTHER, lambda: STATE)
    assert seen == [1]
    assert node.switcher.serving.name == "other"


def test_a_switch_uses_the_new_configuration(node: Node) -> None:
    """A configuration file has a section per mode, so another mode may use another masquerade bit."""
    other = dataclasses.replace(OTHER, iptables_masquerade_bit=20)
    node.switcher.follow(other, lambda: STATE)
    assert node.other.prepared == node.switcher.config == other


def test_the_configuration_of_a_failed_switch_is_not_used(node: Node) -> None:
    node.other.fails = KernelError("not here")
    node.switcher.follow(dataclasses.replace(OTHER, iptables_masquerade_bit=20), lambda: STATE)
    assert node.switcher.config == CONFIG


def test_the_state_is_read_after_the_other_mode_is_open(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = []
    open_it = FakeBackend.open

    def note_and_open(plane: FakeBackend) -> None:
        happened.append("open")
        open_it(plane)

    def state_now() -> ClusterState:
        happened.append("state")
        return STATE

    monkeypatch.setattr(FakeBackend, "open", note_and_open)
    node.switcher.follow(OTHER, state_now)
    assert happened == ["open", "state"]


def test_objects_of_the_first_mode_are_removed_after_a_switch(node: Node) -> None:
    node.switcher.follow(OTHER, lambda: STATE)
    gone(node.one)
    assert node.other.kernel.ports


@pytest.mark.parametrize("kernel_translates", [True, False])
def test_open_connections_delay_the_cleanup_only_if_the_new_mode_cannot_serve_them(
    node: Node, kernel_translates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conntrack, "nat_in_use", lambda of: True)
    node.other.uses_kernel_nat = kernel_translates
    node.switcher.follow(OTHER, lambda: STATE)
    gone(node.one)
    assert node.one.translates is not kernel_translates


def test_if_the_kernel_cannot_report_connections_the_cleanup_assumes_some(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(of: Family) -> bool:
        raise Unsupported("no ctnetlink")

    monkeypatch.setattr(conntrack, "nat_in_use", reject)
    node.switcher.follow(OTHER, lambda: STATE)
    gone(node.one)
    assert node.one.translates


def test_a_switch_to_the_current_mode_changes_nothing(node: Node) -> None:
    serving = node.switcher.serving
    node.switcher.follow(CONFIG, lambda: STATE)
    assert node.switcher.serving is serving


@pytest.mark.parametrize("when", ["prepare", "apply"])
def test_a_failed_switch_keeps_the_first_mode(node: Node, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = KernelError("no such table")
    apply = FakeBackend.apply

    def fail(plane: FakeBackend, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        if plane is node.other.plane:
            raise failure
        return apply(plane, delta)

    if when == "prepare":
        node.other.fails = failure
    else:
        monkeypatch.setattr(FakeBackend, "apply", fail)
    node.switcher.follow(OTHER, lambda: STATE)
    assert node.switcher.serving.name == "one"
    assert node.one.kernel.ports
    assert node.metric("ebpfproxy_mode_switches_failed_total") == 1
    gone(node.other)


@pytest.mark.parametrize(("times", "serving", "failed"), [(1, "other", 0), (4, "other", 0), (5, "one", 1)])
def test_a_switch_during_which_the_node_changes_is_repeated_after_a_sync(
    node: Node, times: int, serving: str, failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found with random changes: a device was renamed, and the agent stayed in its mode."""
    apply, left = FakeBackend.apply, [None] * times

    def change(plane: FakeBackend, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        result = apply(plane, delta)
        if plane is not node.one.plane and plane not in changed and left:
            changed.append(plane)
            left.pop()
            node.other.kernel.ports.clear()
        return result

    changed: list[FakeBackend] = []
    monkeypatch.setattr(FakeBackend, "apply", change)
    assert node.switcher.follow(OTHER, lambda: STATE) is False
    while node.switcher.pending_config:
        assert node.switcher.serving.name == "one"
        changed.clear()
        node.switcher.sync(verify=False)
        node.switcher.follow(node.switcher.pending_config, lambda: STATE)
    assert node.switcher.serving.name == serving
    assert node.metric("ebpfproxy_mode_switches_failed_total") == failed


def test_after_a_failed_switch_the_first_mode_is_restored_before_the_cleanup(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modes ipvs and iptables share chains."""
    gone(node.other)
    node.other.drained = 0
    apply = FakeBackend.apply
    seen = []

    def take_and_fail(plane: FakeBackend, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        if plane is node.other.plane:
            node.one.kernel.ports.clear()
            raise KernelError("no such table")
        seen.append(node.other.drained)
        return apply(plane, delta)

    monkeypatch.setattr(FakeBackend, "apply", take_and_fail)
    node.switcher.follow(OTHER, lambda: STATE)
    assert node.one.kernel.ports
    assert seen == [0]
    gone(node.other)


def test_if_no_mode_can_be_written_the_switch_reports_that_a_sync_is_needed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example while another process holds the lock of iptables."""

    def fail(plane: FakeBackend, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        raise KernelError("another process holds the lock")

    with monkeypatch.context() as held:
        held.setattr(FakeBackend, "apply", fail)
        assert not node.switcher.follow(OTHER, lambda: STATE)
    node.switcher.sync(verify=False)
    assert node.switcher.follow(OTHER, lambda: STATE)
    assert node.switcher.serving.name == "other"


def test_the_cleanup_is_retried_after_an_unexpected_error(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mode_cleanup, "_INTERVAL", 0.001)
    drain = node.one.drain

    def fail_once(config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        monkeypatch.setattr(node.one, "drain", drain)
        raise ValueError("unforeseen")

    monkeypatch.setattr(node.one, "drain", fail_once)
    node.switcher.follow(OTHER, lambda: STATE)
    gone(node.one)
    assert "unforeseen" in str([record.__dict__.get("values") for record in caplog.records])


def test_a_failed_switch_removes_nothing_if_another_agent_has_the_namespace(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(patience: float) -> None:
        raise AlreadyExists("another ebpfproxy agent runs in this network namespace")

    gone(node.other)
    node.switcher.close()
    node.one.owns_namespace = False
    monkeypatch.setattr(mode_switch, "NamespaceLock", taken)
    node.start()
    drained = node.other.drained
    node.switcher.follow(OTHER, lambda: STATE)
    time.sleep(0.1)  # in which nothing happens
    node.switcher.close()
    assert node.switcher.serving.name == "one"
    assert node.other.drained == drained


def test_the_cleanup_of_a_mode_ends_when_it_becomes_current_again(node: Node) -> None:
    node.one.left = 1000
    node.switcher.follow(OTHER, lambda: STATE)
    node.switcher.follow(CONFIG, lambda: STATE)
    drained = node.one.drained
    assert node.one.kernel.ports
    node.switcher.follow(CONFIG, lambda: STATE)
    assert node.one.drained == drained


def test_the_cleanup_pauses_while_a_mode_starts(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third mode may share chains with it, as ipvs and iptables do."""
    monkeypatch.setattr(mode_cleanup, "_INTERVAL", 0.001)
    node.third.left = 1_000_000
    node.switcher.follow(OTHER, lambda: STATE)
    steps = []
    apply = FakeBackend.apply

    def apply_slowly(plane: FakeBackend, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        before = node.third.drained
        time.sleep(0.1)
        steps.append(node.third.drained - before)
        return apply(plane, delta)

    monkeypatch.setattr(FakeBackend, "apply", apply_slowly)
    node.switcher.follow(CONFIG, lambda: STATE)
    assert node.switcher.serving.name == "one"
    assert steps
    assert not any(steps)


def test_a_switch_requested_before_the_first_sync_is_pending(node: Node) -> None:
    node.switcher.close()
    node.start(synced=False)
    node.switcher.follow(OTHER, lambda: STATE)
    assert (node.switcher.serving.name, node.switcher.pending_config) == ("one", OTHER)
    node.switcher.sync(verify=True)
    node.switcher.follow(OTHER, lambda: STATE)
    assert (node.switcher.serving.name, node.switcher.pending_config) == ("other", None)


def test_a_pending_switch_is_dropped_if_the_configuration_is_reverted(node: Node) -> None:
    node.switcher.close()
    node.start(synced=False)
    node.switcher.follow(OTHER, lambda: STATE)
    node.switcher.follow(CONFIG, lambda: STATE)
    assert node.switcher.pending_config is None


def test_an_agent_that_does_not_own_the_namespace_cleans_up_nothing(node: Node) -> None:
    gone(node.other)
    node.switcher.close()
    drained = node.other.drained
    node.one.owns_namespace = False
    node.start()
    node.switcher.close()
    assert node.other.drained == drained


def test_an_agent_does_not_start_if_another_one_has_its_network_namespace(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(patience: float) -> None:
        raise AlreadyExists("another ebpfproxy agent runs in this network namespace")

    monkeypatch.setattr(mode_switch, "NamespaceLock", taken)
    node.switcher.close()
    node.one.kernel.writes.clear()
    with pytest.raises(AlreadyExists):
        node.start()
    assert node.one.kernel.writes == []


# With `auto`: modes that fail after successful probes

ANY = dataclasses.replace(CONFIG, proxy_mode=AUTO)
REJECTED = ProgramRejected(
    "cannot load BPF program to_any: Permission denied: R1 invalid mem access",
    "use another --proxy-mode",
    "to_any",
    errno.EACCES,
    ("1: (61) r0 = *(u32 *)(r1 +0)", "R1 invalid mem access"),
)


@pytest.fixture
def fresh(node: Node) -> Node:
    """No mode is open, and no mode has objects in the kernel."""
    gone(node.other)
    node.switcher.close()
    for mode in (node.one, node.other, node.third):
        mode.kernel.ports.clear()
        mode.drained = 0
    return node


def opening_fails(monkeypatch: pytest.MonkeyPatch, failures: Mapping[FakeMode, KernelError]) -> None:
    open_it = FakeBackend.open

    def fail(plane: FakeBackend) -> None:
        for mode, failure in failures.items():
            if mode.plane is plane:
                raise failure
        open_it(plane)

    monkeypatch.setattr(FakeBackend, "open", fail)


def applying_fails(monkeypatch: pytest.MonkeyPatch, of: FakeMode, failure: KernelError) -> None:
    apply = FakeBackend.apply

    def fail(plane: FakeBackend, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        if plane is of.plane:
            raise failure
        return apply(plane, delta)

    monkeypatch.setattr(FakeBackend, "apply", fail)


def unavailable(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    return [
        record.__dict__["values"] | {"level": record.levelname}
        for record in caplog.records
        if record.getMessage() == mode_switch.UNAVAILABLE
    ]


def fail_to_sync(node: Node) -> KernelError:
    """Sync as the daemon does, and fall back because of the failure."""
    with pytest.raises(KernelError) as caught:
        node.switcher.sync(verify=True)
    node.switcher.fall_back(caught.value, lambda: STATE)
    return caught.value


def test_auto_takes_the_next_mode_if_programs_are_rejected_at_the_start(
    fresh: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening_fails(monkeypatch, {fresh.one: REJECTED})
    fresh.start(config=ANY)
    assert fresh.switcher.serving.name == "other"
    assert fresh.other.kernel.ports
    assert unavailable(caplog) == [
        {
            "level": "ERROR",
            "mode": "one",
            "reason": REJECTED.message,
            "program": "to_any",
            "verifier": "1: (61) r0 = *(u32 *)(r1 +0) | R1 invalid mem access",
            "hint": "use another --proxy-mode",
        }
    ]
    assert fresh.metric("ebpfproxy_mode_switches_failed_total") == 1
    gone(fresh.one)


def test_a_configured_mode_that_fails_ends_the_agent(
    fresh: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening_fails(monkeypatch, {fresh.one: REJECTED})
    with pytest.raises(ProgramRejected) as caught:
        fresh.start(config=CONFIG)
    assert caught.value is REJECTED
    assert not unavailable(caplog)
    assert not fresh.other.kernel.ports


def test_auto_does_not_take_the_next_mode_if_another_agent_has_the_pins(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents would forward on one node."""
    opening_fails(monkeypatch, {fresh.one: AlreadyExists("another ebpfproxy holds these pins")})
    with pytest.raises(AlreadyExists):
        fresh.start(config=ANY)


def test_if_every_mode_fails_the_error_names_each_reason(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.third.fails = KernelError("no such table")
    opening_fails(monkeypatch, {fresh.one: REJECTED, fresh.other: KernelError("no such set")})
    with pytest.raises(Unsupported) as caught:
        fresh.start(config=ANY)
    for reason in (REJECTED.message, "other: no such set", "third: no such table"):
        assert reason in caught.value.message
    assert caught.value.exit_code == 4


def test_a_mode_that_auto_could_not_select_is_reported_until_it_serves(fresh: Node) -> None:
    fresh.one.fails = KernelError("not here")
    fresh.start(config=ANY)
    assert fresh.fallbacks[-1] == {"one": "not here"}
    assert fresh.metric("ebpfproxy_mode_fallback") == 1
    fresh.one.fails = None
    fresh.switcher.follow(CONFIG, lambda: STATE)
    assert fresh.switcher.serving.name == "one"
    assert fresh.fallbacks[-1] == {}
    assert fresh.metric("ebpfproxy_mode_fallback") == 0


def test_auto_takes_the_next_mode_if_one_cannot_be_prepared(fresh: Node) -> None:
    fresh.one.fails = KernelError("no cgroup")
    fresh.start(config=ANY)
    assert fresh.switcher.serving.name == "other"


def test_after_three_failed_first_syncs_auto_takes_the_next_mode_with_the_complete_state(
    fresh: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    applying_fails(monkeypatch, fresh.one, KernelError("not permitted"))
    fresh.start(synced=False, config=ANY)
    for _ in range(2):
        fail_to_sync(fresh)
        assert fresh.switcher.serving.name == "one", "another process may hold a lock"
    fail_to_sync(fresh)
    assert fresh.switcher.serving.name == "other"
    fresh.switcher.sync(verify=True)
    assert fresh.other.kernel.ports
    assert [line["mode"] for line in unavailable(caplog)] == ["one"]
    gone(fresh.one)


def test_auto_takes_the_next_mode_at_once_if_a_program_is_rejected_in_the_first_sync(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    applying_fails(monkeypatch, fresh.one, REJECTED)
    fresh.start(synced=False, config=ANY)
    assert fail_to_sync(fresh) is REJECTED
    assert fresh.switcher.serving.name == "other"


def test_auto_keeps_the_mode_if_another_agent_has_the_pins_at_the_first_sync(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    applying_fails(monkeypatch, fresh.one, AlreadyExists("another ebpfproxy holds these pins"))
    fresh.start(synced=False, config=ANY)
    for _ in range(5):
        fail_to_sync(fresh)
    assert fresh.switcher.serving.name == "one"


def test_auto_keeps_a_mode_that_has_synced_whatever_fails_later(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.start(config=ANY)
    applying_fails(monkeypatch, fresh.one, REJECTED)
    for _ in range(5):
        fail_to_sync(fresh)
    assert fresh.switcher.serving.name == "one"


def test_auto_takes_the_next_mode_if_one_forwards_nothing_after_its_first_sync(fresh: Node) -> None:
    """For example if a security module allows loading programs, but not attaching them."""
    fresh.one.lacking = KernelError("cannot attach connect4: Operation not permitted")
    fresh.start(synced=False, config=ANY)
    for _ in range(3):
        assert fail_to_sync(fresh) is fresh.one.lacking
    assert fresh.switcher.serving.name == "other"


def test_auto_keeps_an_incomplete_mode_if_no_other_mode_works(fresh: Node) -> None:
    missing = Finding("tables", errno.EOPNOTSUPP, "there are none")
    fresh.other.findings = fresh.third.findings = (missing,)
    fresh.one.lacking = KernelError("cannot attach connect4: Operation not permitted")
    fresh.start(synced=False, config=ANY)
    for _ in range(3):
        fail_to_sync(fresh)
    fresh.switcher.sync(verify=True)
    assert fresh.switcher.serving.name == "one"
    assert fresh.one.kernel.ports


def test_auto_does_not_retry_a_failed_mode_until_the_configuration_names_it(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as failing:
        opening_fails(failing, {fresh.one: REJECTED})
        fresh.start(config=ANY)
    fresh.switcher.follow(ANY, lambda: STATE)
    assert fresh.switcher.serving.name == "other", "it stays where it is at SIGHUP"
    fresh.switcher.follow(CONFIG, lambda: STATE)
    assert fresh.switcher.serving.name == "one"
    fresh.switcher.follow(OTHER, lambda: STATE)
    fresh.switcher.follow(ANY, lambda: STATE)
    assert fresh.switcher.serving.name == "one", "it has worked since"
