"""What an agent uses: readings of a process, and entries of maps that remain."""

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ebpfproxy.bench import agent_use
from ebpfproxy.bench.agent_use import AgentUse, Meter
from ebpfproxy.lab import Agent, Netns

ENTRIES = 'ebpfproxy_map_entries{{map="slots"}} {}\nebpfproxy_map_entries{{map="flows"}} {}\n'


def this_process() -> Agent:
    return cast(Agent, SimpleNamespace(process=SimpleNamespace(pid=_pid()), rss_mb=lambda: 1.0))


def _pid() -> int:
    return int(Path("/proc/self").resolve().name)


def node(scrapes: Iterator[str]) -> Netns:
    """A node whose agent answers with these metrics, one after the other."""
    return cast(Netns, SimpleNamespace(call=lambda _function: next(scrapes)))


@contextlib.contextmanager
def busy_thread(name: str) -> Iterator[None]:
    """A thread of this process that has used half a second of CPU, and still exists."""
    used, end = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        while agent_use.read(this_process()).manifests_seconds < 0.1 and not end.is_set():
            sum(range(100_000))
        used.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert used.wait(30.0)
        yield
    finally:
        end.set()
        thread.join()


def readings() -> tuple[AgentUse, AgentUse]:
    """What this process uses before and after it opens a file and starts a thread."""
    before = agent_use.read(this_process())
    with open("/dev/null"), busy_thread("manifests"):
        return before, agent_use.read(this_process())


def test_descriptors_threads_and_the_manifests_thread_are_read() -> None:
    """In a process of its own: threads of other tests may end meanwhile."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        before, now = pool.submit(readings).result()
    assert (now.descriptors, now.threads) == (before.descriptors + 1, before.threads + 1)
    assert before.manifests_seconds == 0.0
    assert 0.1 <= now.manifests_seconds <= now.cpu_seconds


def test_entries_that_remain_are_leaks_but_flows_are_not() -> None:
    meter = Meter(node(iter([ENTRIES.format(10, 5), ENTRIES.format(12, 99)])), this_process())
    assert meter.leaks(patience=0.0) == {"leaked_slots": 2}


def test_entries_that_are_freed_after_a_grace_period_are_no_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    meter = Meter(node(iter([ENTRIES.format(count, 0) for count in (10, 14, 13, 10)])), this_process())
    assert meter.leaks() == {"leaked_slots": 0}


def test_a_mode_without_bpf_maps_has_no_leaks() -> None:
    meter = Meter(node(iter([ENTRIES.format(10, 0), ""])), this_process())
    assert meter.leaks() == {}


def test_memory_has_the_values_of_begin_middle_and_end() -> None:
    readings = iter([10.0, 11.0, 12.0, 13.0, 14.0])
    agent = this_process()
    agent.rss_mb = lambda: next(readings)  # type: ignore[method-assign]
    meter = Meter(node(iter([""])), agent)
    for _ in range(3):
        meter.sample()
    figures = meter.end()
    assert [figures[f"rss_{name}_mb"] for name in ("begin", "middle", "end")] == [10.0, 12.0, 14.0]
