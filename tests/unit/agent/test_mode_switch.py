"""Moving from one mode to another over fakes: what serves when, and what a failure leaves."""

import dataclasses
import errno
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import pytest

from ebpfproxy.agent import mode_cleanup, mode_switch
from ebpfproxy.agent.mode_switch import ModeSwitcher
from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.mode import Callbacks
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
STATE = ClusterState({WEB.name: WEB}, {WEB.name: {SLICE.name: SLICE}})


class FreeLock:
    """Of a network namespace that nobody else has."""

    def __init__(self, patience: float) -> None:
        pass

    def release(self) -> None:
        pass


class Node:
    """An agent's modes, synced once in mode one."""

    def __init__(self) -> None:
        self.one, self.other, self.third = FakeMode("one"), FakeMode("other"), FakeMode("third")
        self.metrics = Metrics()

    def start(self, *, synced: bool = True, config: Config = CONFIG) -> None:
        callbacks = Callbacks(lambda destroyed, failed: None, lambda devices: None)
        self.keeper = ModeSwitcher(config, callbacks, self.metrics)
        self.keeper.open()
        self.keeper.serving.proxier.plan(
            STATE, frozenset({name("web")}), node_changed=True, host_changed=True
        )
        if synced:
            self.keeper.sync(verify=True)

    def metric(self, wanted: str) -> float:
        found = (sample for family in self.metrics.registry.collect() for sample in family.samples)
        return sum(sample.value for sample in found if sample.name == wanted)


def gone(mode: FakeMode) -> None:
    """Await that nothing of the mode is left; the thread that removes it has no other sign."""
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
    made.keeper.close()


def test_the_other_mode_has_everything_before_the_first_one_is_let_go(node: Node) -> None:
    seen = []
    serving = node.keeper.serving
    close = serving.close

    def note_and_close() -> None:
        seen.append(len(node.other.kernel.ports))
        close()

    serving.close = note_and_close  # type: ignore[method-assign]
    node.keeper.follow(OTHER, lambda: STATE)
    assert seen == [1]
    assert node.keeper.serving.name == "other"


def test_a_mode_is_made_by_the_configuration_that_asks_for_it(node: Node) -> None:
    """A file has sections of modes: another mode may masquerade by another bit."""
    other = dataclasses.replace(OTHER, iptables_masquerade_bit=20)
    node.keeper.follow(other, lambda: STATE)
    assert node.other.prepared == node.keeper.config == other


def test_a_configuration_whose_mode_fails_counts_for_nothing(node: Node) -> None:
    node.other.fails = KernelError("not here")
    node.keeper.follow(dataclasses.replace(OTHER, iptables_masquerade_bit=20), lambda: STATE)
    assert node.keeper.config == CONFIG


def test_the_state_that_a_mode_takes_over_has_what_it_found_of_a_previous_run(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = []
    open_it = FakeBackend.open

    def note_and_open(plane: FakeBackend) -> None:
        happened.append("open")
        open_it(plane)

    def state_now() -> ClusterState:
        happened.append("state")
        return STATE

    monkeypatch.setattr(FakeBackend, "open", note_and_open)
    node.keeper.follow(OTHER, state_now)
    assert happened == ["open", "state"]


def test_what_the_first_mode_left_is_removed(node: Node) -> None:
    node.keeper.follow(OTHER, lambda: STATE)
    gone(node.one)
    assert node.other.kernel.ports


@pytest.mark.parametrize("kernel_translates", [True, False])
def test_open_connections_are_waited_for_only_where_the_serving_mode_does_not_serve_them(
    node: Node, kernel_translates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conntrack, "nat_in_use", lambda of: True)
    node.other.uses_kernel_nat = kernel_translates
    node.keeper.follow(OTHER, lambda: STATE)
    gone(node.one)
    assert node.one.translates is not kernel_translates


def test_where_the_kernel_tells_no_connections_it_may_have_some(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(of: Family) -> bool:
        raise Unsupported("no ctnetlink")

    monkeypatch.setattr(conntrack, "nat_in_use", reject)
    node.keeper.follow(OTHER, lambda: STATE)
    gone(node.one)
    assert node.one.translates


def test_a_move_to_the_mode_that_serves_changes_nothing(node: Node) -> None:
    serving = node.keeper.serving
    node.keeper.follow(CONFIG, lambda: STATE)
    assert node.keeper.serving is serving


@pytest.mark.parametrize("when", ["prepare", "apply"])
def test_a_move_that_fails_leaves_the_first_mode_serving(
    node: Node, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    node.keeper.follow(OTHER, lambda: STATE)
    assert node.keeper.serving.name == "one"
    assert node.one.kernel.ports
    assert node.metric("ebpfproxy_mode_moves_failed_total") == 1
    gone(node.other)


def test_what_a_failed_move_took_is_put_back_before_the_other_mode_is_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modes ipvs and iptables have chains in common."""
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
    node.keeper.follow(OTHER, lambda: STATE)
    assert node.one.kernel.ports
    assert seen == [0]
    gone(node.other)


def test_where_neither_the_other_mode_nor_the_first_can_be_written_that_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As somebody holds the lock of iptables; a sync is wanted soon, though nothing changes."""

    def fail(plane: FakeBackend, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        raise KernelError("another process holds the lock")

    with monkeypatch.context() as held:
        held.setattr(FakeBackend, "apply", fail)
        assert not node.keeper.follow(OTHER, lambda: STATE)
    node.keeper.sync(verify=False)
    assert node.keeper.follow(OTHER, lambda: STATE)
    assert node.keeper.serving.name == "other"


def test_whatever_goes_wrong_what_others_left_is_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mode_cleanup, "_STEP", 0.001)
    drain = node.one.drain

    def fail_once(config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        monkeypatch.setattr(node.one, "drain", drain)
        raise ValueError("unforeseen")

    monkeypatch.setattr(node.one, "drain", fail_once)
    node.keeper.follow(OTHER, lambda: STATE)
    gone(node.one)
    assert "unforeseen" in str([record.__dict__.get("values") for record in caplog.records])


def test_a_failed_move_removes_nothing_where_another_agent_has_the_namespace(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(patience: float) -> None:
        raise AlreadyExists("another ebpfproxy manages this network namespace")

    gone(node.other)
    node.keeper.close()
    node.one.owns_namespace = False
    monkeypatch.setattr(mode_switch, "NamespaceLock", taken)
    node.start()
    drained = node.other.drained
    node.keeper.follow(OTHER, lambda: STATE)
    time.sleep(0.1)  # in which nothing happens
    node.keeper.close()
    assert node.keeper.serving.name == "one"
    assert node.other.drained == drained


def test_a_mode_that_serves_again_is_spared(node: Node) -> None:
    node.one.left = 1000
    node.keeper.follow(OTHER, lambda: STATE)
    node.keeper.follow(CONFIG, lambda: STATE)
    drained = node.one.drained
    assert node.one.kernel.ports
    node.keeper.follow(CONFIG, lambda: STATE)
    assert node.one.drained == drained


def test_nothing_is_removed_while_a_mode_begins(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third mode may have chains in common with it, as ipvs and iptables have."""
    monkeypatch.setattr(mode_cleanup, "_STEP", 0.001)
    node.third.left = 1_000_000
    node.keeper.follow(OTHER, lambda: STATE)
    steps = []
    apply = FakeBackend.apply

    def apply_slowly(plane: FakeBackend, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        before = node.third.drained
        time.sleep(0.1)
        steps.append(node.third.drained - before)
        return apply(plane, delta)

    monkeypatch.setattr(FakeBackend, "apply", apply_slowly)
    node.keeper.follow(CONFIG, lambda: STATE)
    assert node.keeper.serving.name == "one"
    assert steps
    assert not any(steps)


def test_a_move_that_is_asked_for_before_the_first_sync_waits_for_it(node: Node) -> None:
    node.keeper.close()
    node.start(synced=False)
    node.keeper.follow(OTHER, lambda: STATE)
    assert (node.keeper.serving.name, node.keeper.asked) == ("one", OTHER)
    node.keeper.sync(verify=True)
    node.keeper.follow(OTHER, lambda: STATE)
    assert (node.keeper.serving.name, node.keeper.asked) == ("other", None)


def test_a_move_that_is_taken_back_before_the_first_sync_is_not_made(node: Node) -> None:
    node.keeper.close()
    node.start(synced=False)
    node.keeper.follow(OTHER, lambda: STATE)
    node.keeper.follow(CONFIG, lambda: STATE)
    assert node.keeper.asked is None


def test_an_agent_that_has_no_devices_leaves_what_others_have_in_the_namespace(node: Node) -> None:
    gone(node.other)
    node.keeper.close()
    drained = node.other.drained
    node.one.owns_namespace = False
    node.start()
    node.keeper.close()
    assert node.other.drained == drained


def test_an_agent_gives_way_to_another_one_in_its_network_namespace(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(patience: float) -> None:
        raise AlreadyExists("another ebpfproxy manages this network namespace")

    monkeypatch.setattr(mode_switch, "NamespaceLock", taken)
    node.keeper.close()
    node.one.kernel.writes.clear()
    with pytest.raises(AlreadyExists):
        node.start()
    assert node.one.kernel.writes == []


# With `auto`, a mode that fails although its probes succeeded

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
    """No mode is open, and none has anything in the kernel."""
    gone(node.other)
    node.keeper.close()
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
    """As the daemon does: the failure is what the mode may be left for."""
    with pytest.raises(KernelError) as caught:
        node.keeper.sync(verify=True)
    node.keeper.leave_failing(caught.value, lambda: STATE)
    return caught.value


def test_a_mode_whose_programs_are_rejected_at_the_start_is_left_for_the_next(
    fresh: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening_fails(monkeypatch, {fresh.one: REJECTED})
    fresh.start(config=ANY)
    assert fresh.keeper.serving.name == "other"
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
    assert fresh.metric("ebpfproxy_mode_moves_failed_total") == 1
    gone(fresh.one)


def test_a_mode_that_the_configuration_names_is_not_left(
    fresh: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening_fails(monkeypatch, {fresh.one: REJECTED})
    with pytest.raises(ProgramRejected) as caught:
        fresh.start(config=CONFIG)
    assert caught.value is REJECTED
    assert not unavailable(caplog)
    assert not fresh.other.kernel.ports


def test_pins_that_another_agent_has_are_no_reason_to_leave_a_mode(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents would forward on one node."""
    opening_fails(monkeypatch, {fresh.one: AlreadyExists("another ebpfproxy holds these pins")})
    with pytest.raises(AlreadyExists):
        fresh.start(config=ANY)


def test_where_every_mode_fails_the_error_names_each_reason(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.third.fails = KernelError("no such table")
    opening_fails(monkeypatch, {fresh.one: REJECTED, fresh.other: KernelError("no such set")})
    with pytest.raises(Unsupported) as caught:
        fresh.start(config=ANY)
    for reason in (REJECTED.message, "other: no such set", "third: no such table"):
        assert reason in caught.value.message
    assert caught.value.exit_code == 4


def test_a_mode_that_cannot_be_prepared_is_left_for_the_next(fresh: Node) -> None:
    fresh.one.fails = KernelError("no cgroup")
    fresh.start(config=ANY)
    assert fresh.keeper.serving.name == "other"


def test_a_mode_whose_first_syncs_fail_is_left_with_all_of_the_state(
    fresh: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    applying_fails(monkeypatch, fresh.one, KernelError("not permitted"))
    fresh.start(synced=False, config=ANY)
    for _ in range(2):
        fail_to_sync(fresh)
        assert fresh.keeper.serving.name == "one", "another process may hold a lock"
    fail_to_sync(fresh)
    assert fresh.keeper.serving.name == "other"
    fresh.keeper.sync(verify=True)
    assert fresh.other.kernel.ports
    assert [line["mode"] for line in unavailable(caplog)] == ["one"]
    gone(fresh.one)


def test_a_program_that_is_rejected_at_the_first_sync_is_not_tried_again(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    applying_fails(monkeypatch, fresh.one, REJECTED)
    fresh.start(synced=False, config=ANY)
    assert fail_to_sync(fresh) is REJECTED
    assert fresh.keeper.serving.name == "other"


def test_pins_that_another_agent_took_before_the_first_sync_are_no_reason_either(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    applying_fails(monkeypatch, fresh.one, AlreadyExists("another ebpfproxy holds these pins"))
    fresh.start(synced=False, config=ANY)
    for _ in range(5):
        fail_to_sync(fresh)
    assert fresh.keeper.serving.name == "one"


def test_a_mode_that_has_synced_is_not_left_whatever_fails_later(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.start(config=ANY)
    applying_fails(monkeypatch, fresh.one, REJECTED)
    for _ in range(5):
        fail_to_sync(fresh)
    assert fresh.keeper.serving.name == "one"


def test_a_mode_that_forwards_nothing_after_its_first_sync_is_left(fresh: Node) -> None:
    """As a security module lets programs be loaded, and none be attached."""
    fresh.one.lacking = KernelError("cannot attach connect4: Operation not permitted")
    fresh.start(synced=False, config=ANY)
    for _ in range(3):
        assert fail_to_sync(fresh) is fresh.one.lacking
    assert fresh.keeper.serving.name == "other"


def test_where_no_other_mode_works_the_one_that_forwards_something_stays(fresh: Node) -> None:
    missing = Finding("tables", errno.EOPNOTSUPP, "there are none")
    fresh.other.findings = fresh.third.findings = (missing,)
    fresh.one.lacking = KernelError("cannot attach connect4: Operation not permitted")
    fresh.start(synced=False, config=ANY)
    for _ in range(3):
        fail_to_sync(fresh)
    fresh.keeper.sync(verify=True)
    assert fresh.keeper.serving.name == "one"
    assert fresh.one.kernel.ports


def test_auto_takes_a_failed_mode_no_more_and_the_configuration_may_name_it(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as failing:
        opening_fails(failing, {fresh.one: REJECTED})
        fresh.start(config=ANY)
    fresh.keeper.follow(ANY, lambda: STATE)
    assert fresh.keeper.serving.name == "other", "it stays where it is at SIGHUP"
    fresh.keeper.follow(CONFIG, lambda: STATE)
    assert fresh.keeper.serving.name == "one"
    fresh.keeper.follow(OTHER, lambda: STATE)
    fresh.keeper.follow(ANY, lambda: STATE)
    assert fresh.keeper.serving.name == "one", "it has worked since"
