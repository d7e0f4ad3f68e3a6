"""Random histories of puts, drops, restarts and pauses, against a model."""

from collections.abc import Collection, Mapping
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.backends.ebpf.services.table import ServiceTable
from ebpfproxy.errors import TableFull
from ebpfproxy.model.address import Family, Protocol
from tests.kernel.service_table.samples import (
    BOTH,
    CLUSTER,
    LISTED,
    Entries,
    endpoint,
    entry,
    frontend,
    in_force,
    key,
    weighted,
    wipe,
)
from tests.support.clock import Clock
from tests.support.examples import examples
from tests.support.service_maps import check_exact

pytestmark = pytest.mark.kernel


_KEYS = [
    key("a"),
    key("b"),
    key("a", Protocol.UDP),
    key("c", Protocol.TCP, Family.IPV6),
]
_FRONTENDS = [frontend(ip, port) for ip in ("10.96.0.1", "0.0.0.0", "fd00::1") for port in (80, 443)]
_FLAGS = [
    0,
    abi.SERVICE_INTERNAL_LOCAL,
    abi.SERVICE_EXTERNAL_LOCAL | abi.SERVICE_REJECT,
    abi.SERVICE_INTERNAL_LOCAL | abi.SERVICE_EXTERNAL_LOCAL,
]
_ENDPOINT_FLAGS = (CLUSTER, BOTH, LISTED, BOTH | abi.ENDPOINT_ON_NODE, weighted(BOTH, 2), weighted(BOTH, 3))
_ALGORITHMS = (abi.ALGORITHM_RANDOM, abi.ALGORITHM_ROUND_ROBIN, abi.ALGORITHM_LEAST_CONNECTIONS)
_SOURCES = ["0.0.0.0/0", "10.0.0.0/8", "10.0.0.0/9", "10.1.2.3/32", "fd00::/8"]
_PLACES = [(ip, port) for ip in ("10.1.0.1", "10.1.0.2", "10.1.0.3", "fd01::1") for port in (8080, 8081)]


@st.composite
def states(draw: st.DrawFn) -> Entries:
    """Entries of a few keys. No frontend has two owners."""
    chosen = draw(st.lists(st.sampled_from(_KEYS), unique=True, max_size=len(_KEYS)))
    there = draw(st.sets(st.sampled_from(_FRONTENDS))) if chosen else set()
    owners = {f: draw(st.sampled_from(chosen)) for f in sorted(there)}
    made: Entries = {}
    for each in chosen:
        frontends = [
            f._replace(flags=draw(st.sampled_from(_FLAGS))) for f, owner in owners.items() if owner == each
        ]
        places = draw(st.lists(st.sampled_from(_PLACES), unique=True, max_size=6))
        endpoints = [endpoint(ip, draw(st.sampled_from(_ENDPOINT_FLAGS)), port) for ip, port in places]
        sources = draw(st.one_of(st.just(set[str]()), st.sets(st.sampled_from(_SOURCES))))
        affinity = draw(st.sampled_from((0, 0, 600))) if frontends else 0
        algorithm = draw(st.sampled_from(_ALGORITHMS)) if frontends else abi.ALGORITHM_RANDOM
        slow_start = draw(st.sampled_from((0, 30))) if frontends else 0
        served = entry(frontends, endpoints, affinity, sources, algorithm)
        made[each] = served._replace(slow_start=slow_start)
    return made


def visible(served: ServicePortEntry) -> ServicePortEntry:
    """What the maps show of an entry: without frontends, some fields are nowhere."""
    if served.frontends:
        return served
    return served._replace(affinity_timeout=0, algorithm=abi.ALGORITHM_RANDOM, slow_start=0)


class Histories(RuleBasedStateMachine):
    """`kernel` is the expected content of the maps: all entries that were not rejected, and what is served
    of the others."""

    maps: ClassVar[Maps]
    may_reject: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.kernel: Entries = {}

    @initialize()
    def start(self) -> None:
        wipe(self.maps)
        self.table = ServiceTable(self.maps, self.clock)
        assert self.table.read() == {}

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()

    @rule(wanted=states())
    def change(self, wanted: Entries) -> None:
        delta = diff(self.kernel, wanted)
        self.apply(delta.puts, delta.drops)

    def apply(
        self, puts: Mapping[ServicePortKey, ServicePortEntry], drops: Collection[ServicePortKey]
    ) -> bool:
        """Return whether nothing was rejected."""
        rejected = self.table.apply(puts, drops)
        assert self.may_reject or not rejected
        assert all(isinstance(failure, TableFull) for failure in rejected.values())
        for each in drops:
            del self.kernel[each]
        for each, put in puts.items():
            served = put if each not in rejected else in_force(self.table, each)
            if served is None:
                continue
            assert {f[:3] for f in served.frontends} <= {f[:3] for f in put.frontends}
            assert set(served.endpoints.targets()) <= set(put.endpoints.targets())
            self.kernel[each] = visible(served)
            taken = {f[:3] for f in served.frontends}
            for other in self.kernel.keys() - {each}:
                kept = tuple(f for f in self.kernel[other].frontends if f[:3] not in taken)
                self.kernel[other] = visible(self.kernel[other]._replace(frontends=kept))
        check_exact(self.maps, self.kernel, self.table.usage())
        return not rejected

    @rule(number=st.integers(0, 7))
    def drop_one(self, number: int) -> None:
        keys = sorted(self.kernel)
        gone = keys[number % len(keys)] if keys else _KEYS[0]
        self.table.apply({}, [gone])
        self.kernel.pop(gone, None)
        check_exact(self.maps, self.kernel, self.table.usage())

    @rule()
    def read(self) -> None:
        assert self.table.read() == self.kernel
        check_exact(self.maps, self.kernel, self.table.usage())

    @rule()
    def start_again(self) -> None:
        self.table.close()
        self.table = ServiceTable(self.maps, self.clock)
        assert self.table.read() == self.kernel
        check_exact(self.maps, self.kernel, self.table.usage())

    @rule(seconds=st.sampled_from((1.0, GRACE)))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.kernel)
    @rule()
    def put_the_same_again(self) -> None:
        before = sorted(self.maps["services"].items())
        if self.apply(dict(self.kernel), ()):
            assert sorted(self.maps["services"].items()) == before


_HISTORIES = settings(
    max_examples=examples(30),
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_random_histories_leave_exactly_the_written_entries(roomy_maps: Maps) -> None:
    machine = type("Roomy", (Histories,), {"maps": roomy_maps, "may_reject": False})
    run_state_machine_as_test(machine, settings=_HISTORIES)


def test_random_histories_in_small_maps_lose_only_rejected_entries(tiny: Maps) -> None:
    machine = type("Tiny", (Histories,), {"maps": tiny, "may_reject": True})
    run_state_machine_as_test(machine, settings=_HISTORIES)
