"""Health, and response bodies that equal kube-proxy's."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.http.healthz import HealthPages, HealthServer, ProxierHealth
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.http.readiness import Readiness
from ebpfproxy.model.device import DeviceSide
from tests.unit.http.http_client import Answer, ask

PERIOD = 30.0
WALL = 1_714_557_600.0


class Clock:
    """Seconds since the server began at 1000, as both clocks show them: 2024-05-01 10:00:00 UTC."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return 1000.0 + self.passed

    def wall(self) -> float:
        return WALL + self.passed


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health() -> ProxierHealth:
    return ProxierHealth(PERIOD)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def server(clock: Clock, health: ProxierHealth, metrics: Metrics) -> Iterator[HealthServer]:
    pages = HealthPages(health, metrics, monotonic=clock.monotonic, wall=clock.wall)
    one = HealthServer(("127.0.0.1", 0), pages)
    one.start()
    yield one
    one.stop()


def answers(server: HealthServer) -> tuple[Answer, Answer]:
    return ask(server.port, "/healthz"), ask(server.port, "/livez")


def status(updated: str, healthy: bool) -> dict[str, Any]:
    """The field `status` of a body: one sync programs both families."""
    return {family: {"lastUpdated": updated, "healthy": healthy} for family in ("IPv4", "IPv6")}


def test_the_agent_is_healthy_before_the_first_change(health: ProxierHealth) -> None:
    assert health.at(1e9) == (True, None, True)


def test_the_agent_is_healthy_until_a_change_has_waited_for_two_periods(health: ProxierHealth) -> None:
    health.queued(100.0)
    assert (health.at(159.9).healthy, health.at(160.0).healthy) == (True, False)


def test_a_new_sync_period_applies_at_once(health: ProxierHealth) -> None:
    health.queued(100.0)
    health.set_period(2 * PERIOD)
    assert (health.at(219.9).healthy, health.at(220.0).healthy) == (True, False)


def test_the_oldest_waiting_change_determines_health(health: ProxierHealth) -> None:
    health.queued(100.0)
    health.queued(159.0)
    assert not health.at(160.0).healthy


def test_after_a_sync_the_agent_is_healthy_while_nothing_changes(health: ProxierHealth) -> None:
    health.queued(100.0)
    health.updated(170.0)
    assert health.at(1e9) == (True, 170.0, True)


def test_a_change_after_a_sync_begins_a_new_wait(health: ProxierHealth) -> None:
    health.queued(100.0)
    health.updated(150.0)
    health.queued(200.0)
    assert (health.at(259.9).healthy, health.at(260.0).healthy) == (True, False)


def test_node_eligibility_does_not_affect_health(health: ProxierHealth) -> None:
    health.node_eligible(False)
    assert health.at(0.0) == (True, None, False)


def test_a_healthy_body_has_the_current_time_as_last_update(
    server: HealthServer, clock: Clock, health: ProxierHealth
) -> None:
    clock.passed = 1.0
    health.updated(clock.monotonic())
    clock.passed = 90.5
    healthz, livez = answers(server)
    now = "2024-05-01T10:01:30.500000Z"
    body = {
        "lastUpdated": now,
        "currentTime": now,
        "healthy": True,
        "status": status("2024-05-01T10:00:01.000000Z", healthy=True),
    }
    assert (healthz.code, livez.code) == (200, 200)
    assert json.loads(healthz.body) == body | {"nodeEligible": True}
    assert json.loads(livez.body) == body


def test_an_unhealthy_body_has_the_time_of_the_last_update(
    server: HealthServer, clock: Clock, health: ProxierHealth
) -> None:
    clock.passed = 1.25
    health.updated(clock.monotonic())
    health.queued(clock.monotonic())
    clock.passed = 61.25
    healthz, livez = answers(server)
    then = "2024-05-01T10:00:01.250000Z"
    body = {
        "lastUpdated": then,
        "currentTime": "2024-05-01T10:01:01.250000Z",
        "healthy": False,
        "status": status(then, healthy=False),
    }
    assert (healthz.code, livez.code) == (503, 503)
    assert json.loads(healthz.body) == body | {"nodeEligible": True}
    assert json.loads(livez.body) == body


def test_without_update_the_body_has_gos_zero_time_and_no_status(
    server: HealthServer, clock: Clock, health: ProxierHealth
) -> None:
    health.queued(clock.monotonic())
    clock.passed = 60.0
    assert json.loads(ask(server.port, "/livez").body) == {
        "lastUpdated": "0001-01-01T00:00:00Z",
        "currentTime": "2024-05-01T10:01:00.000000Z",
        "healthy": False,
    }


def test_an_ineligible_node_fails_healthz_but_not_livez(
    server: HealthServer, clock: Clock, health: ProxierHealth
) -> None:
    """As in kube-proxy, `healthy` is about the agent."""
    health.node_eligible(False)
    health.updated(clock.monotonic())
    clock.passed = 5.0
    healthz, livez = answers(server)
    then, now = "2024-05-01T10:00:00.000000Z", "2024-05-01T10:00:05.000000Z"
    body = {"lastUpdated": then, "currentTime": now, "healthy": True, "status": status(then, healthy=True)}
    assert (healthz.code, livez.code) == (503, 200)
    assert json.loads(healthz.body) == body | {"nodeEligible": False}
    assert json.loads(livez.body) == body | {"lastUpdated": now}


def test_an_agent_that_never_synced_passes_livez_only(
    server: HealthServer, clock: Clock, health: ProxierHealth
) -> None:
    """For example without a connection to the API server."""
    assert [ask(server.port, path).code for path in ("/livez", "/healthz", "/readyz")] == [200, 503, 503]
    health.queued(clock.monotonic())
    health.updated(clock.monotonic())
    health.node_eligible(False)
    assert ask(server.port, "/readyz").code == 200
    health.queued(clock.monotonic())
    clock.passed = 60.0
    assert ask(server.port, "/readyz").code == 503


def test_the_headers_equal_kube_proxys(server: HealthServer) -> None:
    for answer in answers(server):
        answer.headers.pop("Date")
        assert answer.headers == {
            "Content-Type": "application/json",
            "X-Content-Type-Options": "nosniff",
            "Content-Length": str(len(answer.body)),
        }


@pytest.mark.parametrize("path", ["/", "/healthz/", "/livez/ping", "/metrics", "/ready"])
def test_every_other_path_is_not_found(server: HealthServer, path: str) -> None:
    answer = ask(server.port, path)
    assert (answer.code, answer.body) == (404, b"404 page not found\n")


def test_responses_are_counted_by_code(
    server: HealthServer, clock: Clock, health: ProxierHealth, metrics: Metrics
) -> None:
    health.updated(clock.monotonic())
    answers(server)
    answers(server)
    health.queued(clock.monotonic())
    clock.passed = 60.0
    answers(server)
    ask(server.port, "/elsewhere")
    for name in ("kubeproxy_proxy_healthz_total", "kubeproxy_proxy_livez_total"):
        counts = [metrics.registry.get_sample_value(name, {"code": code}) for code in ("200", "503", "404")]
        assert counts == [2.0, 1.0, None]


BEHIND = DeviceSide("eth0", "ingress", ("cil_from_netdev (tcx program 7)",))


@pytest.mark.parametrize(
    ("side", "code"),
    [
        (BEHIND, 200),
        (BEHIND._replace(contested=True), 503),
        (DeviceSide("eth0", "egress", unreached=True), 503),
    ],
    ids=["behind", "contested", "unreached"],
)
def test_readyz_fails_while_packets_bypass_the_programs_and_names_the_device(
    clock: Clock, health: ProxierHealth, metrics: Metrics, side: DeviceSide, code: int
) -> None:
    health.updated(clock.monotonic())
    pages = HealthPages(health, metrics, bypassed=lambda: (side,), monotonic=clock.monotonic, wall=clock.wall)
    server = HealthServer(("127.0.0.1", 0), pages)
    server.start()
    try:
        answer = ask(server.port, "/readyz")
        assert answer.code == code
        (shown,) = json.loads(answer.body)["devices"]
        assert (shown["device"], shown["side"], shown["position"]) == (side.device, side.side, side.position)
        assert (tuple(shown["before"]), shown["contested"], shown["unreached"]) == side[2:]
        assert {ask(server.port, path).code for path in ("/healthz", "/livez")} == {200}
        assert b"devices" not in ask(server.port, "/healthz").body
    finally:
        server.stop()


def verbose(
    clock: Clock, health: ProxierHealth, readiness: Readiness, *sides: DeviceSide
) -> tuple[int, list[str]]:
    """The status and lines of /readyz?verbose."""
    pages = HealthPages(
        health,
        Metrics(),
        bypassed=lambda: sides,
        readiness=readiness,
        mode=lambda: "nftables",
        monotonic=clock.monotonic,
        wall=clock.wall,
    )
    server = HealthServer(("127.0.0.1", 0), pages)
    server.start()
    try:
        answer = ask(server.port, "/readyz?verbose")
    finally:
        server.stop()
    return answer.code, answer.body.decode().splitlines()


def test_verbose_readyz_before_the_first_sync_names_what_is_missing(
    clock: Clock, health: ProxierHealth
) -> None:
    code, lines = verbose(clock, health, Readiness())
    assert code == 503
    assert lines[0] == "[-]synced failed: no sync has succeeded since the start"
    assert lines[-1] == "readyz check failed"


def test_verbose_readyz_shows_a_fallback_and_the_last_verification_of_a_ready_agent(
    clock: Clock, health: ProxierHealth
) -> None:
    readiness = Readiness()
    readiness.fell_back({"ebpf": "no cgroup hooks"})
    readiness.synced(rejected=2)
    readiness.verified(clock.monotonic(), differences=3)
    health.updated(clock.monotonic())
    clock.passed += 7
    code, lines = verbose(clock, health, readiness, BEHIND)
    assert code == 200
    assert lines == [
        "[+]synced ok",
        "[+]changes ok",
        "[+]services ok: degraded: the kernel rejects 2 entries",
        f"[+]attachments ok: {BEHIND.device} {BEHIND.side} runs after {', '.join(BEHIND.before)}",
        "[+]mode ok: nftables, degraded: ebpf is unavailable: no cgroup hooks",
        "[+]verification ok: 7 s ago, repaired 3 differences",
        "readyz check passed",
    ]


def test_verbose_readyz_fails_while_packets_bypass_the_programs(clock: Clock, health: ProxierHealth) -> None:
    health.updated(clock.monotonic())
    code, lines = verbose(clock, health, Readiness(), DeviceSide("eth0", "egress", unreached=True))
    assert code == 503
    assert "[-]attachments failed: eth0 egress is not reached by packets" in lines
