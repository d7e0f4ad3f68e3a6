"""What a mode cannot honor is logged once for each Service."""

import dataclasses
from collections.abc import Callable

import pytest

from ebpfproxy.agent.ignored_balancing import IgnoredBalancing
from ebpfproxy.backends.selection import MODES
from ebpfproxy.model.balancing import Algorithm, Balancing, parse_weights
from ebpfproxy.model.service import RemovedEndpoints
from ebpfproxy.plan.balancing import Support
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import PlanContext, ServicePortPlan
from tests.support.build import CONTEXT, endpoint, name, port, service, slice_of

RANDOM_ONLY = Support(frozenset({Algorithm.RANDOM}))


def plans(algorithm: Algorithm | None, context: PlanContext = CONTEXT) -> tuple[ServicePortPlan, ...]:
    of = dataclasses.replace(service("web", port()), balancing=Balancing(algorithm))
    return plan_service(of, [slice_of("web", endpoint())], None, context)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, str]]]:
    """Returns the values of the lines since the last call."""

    def take() -> list[dict[str, str]]:
        found = [record.__dict__["values"] for record in caplog.records]
        caplog.clear()
        return found

    return take


def test_a_request_is_logged_once_until_it_changes(logged: Callable[[], list[dict[str, str]]]) -> None:
    ignored = IgnoredBalancing(RANDOM_ONLY, CONTEXT)
    for _ in range(2):
        ignored.update(name("web"), plans(Algorithm.MAGLEV))
    assert logged() == [{"service": "default/web", "ignored": "lb-algorithm maglev"}]
    ignored.update(name("web"), plans(Algorithm.ROUND_ROBIN))
    assert logged() == [{"service": "default/web", "ignored": "lb-algorithm round-robin"}]
    ignored.update(name("web"), plans(Algorithm.RANDOM))
    ignored.update(name("web"), plans(Algorithm.MAGLEV))
    ignored.update(name("web"), ())
    assert len(logged()) == 1


def test_a_flag_is_logged_once_and_not_for_each_service(
    logged: Callable[[], list[dict[str, str]]],
) -> None:
    context = dataclasses.replace(CONTEXT, algorithm=Algorithm.MAGLEV)
    ignored = IgnoredBalancing(RANDOM_ONLY, context)
    for each in "web", "dns":
        ignored.update(name(each), plans(None, context))
    assert logged() == [{"ignored": "lb-algorithm maglev"}]


@pytest.mark.parametrize(
    ("mode", "ignored"),
    [
        ("iptables", "endpoint-weights other than 0, lb-algorithm source-hash, slow-start 30s"),
        ("nftables", "slow-start 30s"),
        ("ebpf", "slow-start 30s (not with source-hash)"),
    ],
)
def test_a_mode_logs_what_it_does_not_have(
    logged: Callable[[], list[dict[str, str]]], mode: str, ignored: str
) -> None:
    support = next(each.balancing for each in MODES if each.name == mode)
    requested = Balancing(Algorithm.SOURCE_HASH, parse_weights("10.1.0.0/16=3"), 30)
    of = dataclasses.replace(service("web", port()), balancing=requested)
    planned = plan_service(of, [slice_of("web", endpoint())], None, CONTEXT)
    IgnoredBalancing(support, CONTEXT).update(name("web"), planned)
    assert logged() == [{"service": "default/web", "ignored": ignored}]


def test_a_mode_that_resets_no_connections_is_reported(logged: Callable[[], list[dict[str, str]]]) -> None:
    of = dataclasses.replace(service("web", port()), removed_endpoints=RemovedEndpoints.RESET)
    planned = plan_service(of, [slice_of("web", endpoint())], None, CONTEXT)
    IgnoredBalancing(RANDOM_ONLY._replace(resets=True), CONTEXT).update(name("web"), planned)
    assert logged() == []
    IgnoredBalancing(RANDOM_ONLY, CONTEXT).update(name("web"), planned)
    assert logged() == [{"service": "default/web", "ignored": "removed-endpoints reset"}]
