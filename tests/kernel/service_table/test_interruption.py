"""Each step of a change: the outcome for clients, and the repair if the process ends there."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.table import ServiceTable
from ebpfproxy.model.address import parse_network
from tests.kernel.service_table.samples import (
    API,
    BOTH,
    CLUSTER,
    GUARDED,
    LISTED,
    SEVERAL,
    WEB,
    Entries,
    bring,
    endpoint,
    exposed,
    key,
    opened,
    packed,
    rows,
    wipe,
)
from tests.kernel.service_table.steps import interrupted, lists_of, watched
from tests.support.service_maps import check_exact, check_safe

pytestmark = pytest.mark.kernel


class Crash(Exception):
    pass


OPEN = GUARDED._replace(
    frontends=tuple(each._replace(flags=0) for each in GUARDED.frontends), source_ranges=()
)
CHANGES: dict[str, tuple[Entries, Entries]] = {
    "first": ({}, SEVERAL),
    "gone": (SEVERAL, {}),
    "grows": (
        {key("web"): WEB},
        {key("web"): WEB._replace(endpoints=packed(*rows(WEB), endpoint("10.1.0.3"), endpoint("10.1.0.4")))},
    ),
    "shrinks": ({key("api"): API}, {key("api"): API._replace(endpoints=API.endpoints[1:2])}),
    "scopes": (
        {key("api"): API},
        {
            key("api"): API._replace(
                endpoints=packed(
                    endpoint("10.1.0.1", BOTH),
                    endpoint("10.1.0.3", LISTED),
                    endpoint("10.1.0.4", CLUSTER),
                ),
                affinity_timeout=0,
            )
        },
    ),
    "moves": (
        {key("a"): WEB, key("b"): exposed(5)},
        {
            key("a"): WEB._replace(frontends=WEB.frontends[:1]),
            key("b"): exposed(5)._replace(
                frontends=tuple(sorted((*exposed(5).frontends, *WEB.frontends[1:])))
            ),
        },
    ),
    "restricted": ({key("web"): OPEN}, {key("web"): GUARDED}),
    "open": ({key("web"): GUARDED}, {key("web"): OPEN}),
    "other ranges": (
        {key("web"): GUARDED},
        {
            key("web"): GUARDED._replace(
                source_ranges=tuple(sorted((*GUARDED.source_ranges[1:], parse_network("192.0.2.0/24"))))
            )
        },
    ),
    "guard moves": ({key("old"): GUARDED}, {key("new"): GUARDED, key("old"): exposed(5)}),
    "renamed": ({key("old"): WEB, key("api"): API}, {key("new"): WEB, key("api"): API}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_at_each_step_of_a_change_a_frontend_has_its_old_or_new_endpoints(roomy: Maps, change: str) -> None:
    """Regression, kubernetes-sigs/kpng: services were written before their slots."""
    before, after = CHANGES[change]
    with opened(roomy) as table:
        bring(table, {}, before)
        with watched(roomy, before, after) as steps:
            bring(table, before, after)
        check_exact(roomy, after, table.usage())
    assert steps


def further(state: Entries) -> Entries:
    """A later desired state: every service has one more endpoint."""
    return {k: e._replace(endpoints=packed(*rows(e), endpoint("10.1.7.7", BOTH))) for k, e in state.items()}


@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_completed_after_a_crash_at_any_step(
    roomy: Maps, change: str, meanwhile: bool, pytestconfig: pytest.Config
) -> None:
    """Also if the desired state changed `meanwhile`. In `make test`, at every third step."""
    before, after = CHANGES[change]
    wanted = further(after) if meanwhile else after
    allowed = lists_of(before, after)
    for length in itertools.count(step=3 if pytestconfig.getoption("sample") else 1):
        wipe(roomy)
        with opened(roomy) as table:
            bring(table, {}, before)
            steps = itertools.count()

            def crash(steps: Iterator[int] = steps, length: int = length) -> None:
                if next(steps) == length:
                    raise Crash

            delta = diff(before, after)
            complete = False
            with interrupted(roomy, crash), contextlib.suppress(Crash):
                table.apply(delta.puts, delta.drops)
                complete = True
            check_safe(roomy, allowed)
            converge(roomy, wanted, (before, after), table if length % 2 else None)
        if complete:
            assert length
            return


def converge(
    maps: Maps, wanted: Entries, previous: tuple[Entries, Entries], same: ServiceTable | None
) -> None:
    """Read and apply, in a new process, or in the same one as after an error."""
    with contextlib.ExitStack() as stack:
        table = same or stack.enter_context(opened(maps))
        with watched(maps, *previous, wanted):
            bring(table, table.read(), wanted)
        check_exact(maps, wanted, table.usage())
        assert table.read() == wanted
        check_exact(maps, wanted, table.usage())
