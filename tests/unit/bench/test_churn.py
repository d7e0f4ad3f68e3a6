"""Cases in which the benchmark churn must fail: dead agents, crashed clients, and no end."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ebpfproxy import cli
from ebpfproxy.agent.sync_log import SYNCED
from ebpfproxy.bench import agent_runner, churn
from ebpfproxy.bench.agent_runner import FaultSchedule
from ebpfproxy.bench.load import Load, LoadFailed
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Agent, Lab
from ebpfproxy.lab.agent import AgentFailed, LogLine

_STARTING = "2025-01-01T00:00:00.000Z INFO Starting node=here"
_SYNCED = f"2025-01-01T00:00:00.000Z INFO {SYNCED} services=1"


def agent(age: float, *lines: str, status: int | None = None) -> Agent:
    """Return an agent started `age` seconds ago. `status` is its exit status, None while it runs."""
    process = SimpleNamespace(poll=lambda: status)
    logged = [LogLine(0.0, text) for text in lines]
    return cast(Agent, SimpleNamespace(process=process, lines=logged, started=time.monotonic() - age))


@pytest.mark.parametrize("status", [0, 1, -9])
def test_an_agent_that_ended_by_itself_fails_the_benchmark(status: int) -> None:
    with pytest.raises(AgentFailed, match=f"with status {status}\n") as caught:
        agent_runner.check_alive(agent(1.0, _STARTING, _SYNCED, status=status))
    assert _STARTING in caught.value.hint


def test_an_agent_that_runs_without_a_sync_fails_the_benchmark() -> None:
    agent_runner.check_alive(agent(1.0, _STARTING))
    agent_runner.check_alive(agent(60.0, _STARTING, _SYNCED))
    with pytest.raises(AgentFailed, match="did not sync"):
        agent_runner.check_alive(agent(31.0, _STARTING, "2025-01-01T00:00:00.000Z INFO Listening x=1"))


def test_a_churn_without_an_end_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="would never end"):
        next(churn.run(churn.Size(0, 0.0, 10.0), FaultSchedule(), ["ebpf"], lambda text, done=None, /: None))


def test_switching_modes_requires_two_modes() -> None:
    with pytest.raises(ConfigError, match="--modes names only ebpf"):
        agent_runner.AgentRunner(cast(Lab, None), Path(), ["ebpf", "ebpf"], FaultSchedule(switch_s=1.0))


@pytest.mark.parametrize(
    ("script", "reason"),
    [("exit 3", "status 3"), ("kill -SEGV $$", "status -11"), ("echo '{'", "not JSON"), ("true", "not JSON")],
)
def test_a_client_that_crashed_fails_the_benchmark_with_a_reason(script: str, reason: str) -> None:
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as client:
        client.wait()
        with pytest.raises(LoadFailed, match=reason):
            Load.__new__(Load).end_churn(client)


def test_a_client_that_ended_normally_has_a_report() -> None:
    with subprocess.Popen(["echo", '{"attempts":1}'], stdout=subprocess.PIPE) as client:
        client.wait()
        assert Load.__new__(Load).end_churn(client) == {"attempts": 1}


def test_clients_without_any_connection_fail_the_benchmark() -> None:
    nothing: dict[str, Any] = {"attempts": 0, "failed": 0, "slowest_us": 0.0, "errors": {}}
    with pytest.raises(LoadFailed, match="no connection was attempted"):
        churn.note(Samples(["ebpf"], 1), "ebpf", "clusterip", [nothing, nothing], [], [], {"syncs": 3})


@pytest.mark.parametrize("flag", ["--switch-s", "--move-s"])
def test_the_interval_of_mode_switches_has_a_previous_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    given: list[FaultSchedule] = []

    def run(size: churn.Size, faults: FaultSchedule, *_: object) -> list[Result]:
        given.append(faults)
        return []

    monkeypatch.setattr(churn, "run", run)
    assert cli.main(["bench", "churn", f"{flag}=20", "--output=json"]) == 0
    assert given == [FaultSchedule(switch_s=20.0)]
    cli.main(["bench", "churn", "--help"])
    assert "--move-s" not in capsys.readouterr().out
