"""What a running agent uses: CPU time, memory, descriptors, threads, and entries of maps."""

import contextlib
import os
import re
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.lab import Agent, Netns

_MAP_ENTRIES = re.compile(r'^ebpfproxy_map_entries\{map="([^"]+)"\} (\S+)$', re.MULTILINE)
_MANIFESTS_THREAD = "manifests"
LEAKABLE = ("services", "slots", "endpoints", "source_ranges")
"""Maps whose entries depend only on the objects. Those of flows depend on the traffic."""
_PATIENCE, _STEP = 30.0, 0.5


class AgentUse(NamedTuple):
    """`cpu_seconds` and `manifests_seconds` count from the start of the agent. The latter are those of the
    thread that reads the folder of manifests. `rss_mb` is in MB of 10^6 bytes."""

    cpu_seconds: float
    manifests_seconds: float
    rss_mb: float
    descriptors: int
    threads: int


def read(agent: Agent) -> AgentUse:
    """Return what the agent uses now. Raises OSError if it has ended."""
    process = Path(f"/proc/{agent.process.pid}")
    return AgentUse(
        cpu_seconds(agent),
        _thread_seconds(process / "task", _MANIFESTS_THREAD),
        agent.rss_mb(),
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
    )


def cpu_seconds(agent: Agent) -> float:
    """Return the CPU time of the agent so far, without the tools that it starts."""
    return _seconds(Path(f"/proc/{agent.process.pid}/stat"))


def map_entries(node: Netns) -> Mapping[str, int]:
    """Return the entries of each map of the agent on this node, by its metrics; empty without BPF maps."""
    return entries_of_maps(node.call(scrape))


def scrape() -> str:
    """Return the agent's metrics. Runs on the node."""
    with urllib.request.urlopen("http://127.0.0.1:10249/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def entries_of_maps(metrics: str) -> dict[str, int]:
    """Return the entries of each map in an agent's metrics.

    >>> entries_of_maps('ebpfproxy_map_entries{map="slots"} 12.0')
    {'slots': 12}
    """
    return {name: int(float(count)) for name, count in _MAP_ENTRIES.findall(metrics)}


def _thread_seconds(threads: Path, name: str) -> float:
    """Of the threads of that name that still run."""
    seconds = 0.0
    for thread in threads.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if (thread / "comm").read_text().strip() == name:
                seconds += _seconds(thread / "stat")
    return seconds


def _seconds(stat: Path) -> float:
    """Return the CPU time in a file of the form proc_pid_stat(5): fields utime and stime."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Meter:
    """Compares what the agent uses at the begin and the end of a run. Its metrics:

    - agent_cores, agent_cores_without_manifests: CPU seconds per second; the latter without the thread that
      reads the folder of manifests;
    - rss_begin_mb, rss_middle_mb, rss_end_mb: memory, in MB of 10^6 bytes;
    - descriptors_begin, descriptors_end, threads_begin, threads_end;
    - leaked_services, leaked_slots, leaked_endpoints, leaked_source_ranges: how many more entries the maps of
      mode ebpf have than at the begin, after all objects are as they were at the begin. An endpoint has one
      id, which is its entry.
    """

    def __init__(self, node: Netns, agent: Agent) -> None:
        """Begin. The agent has synced."""
        self._node, self.agent = node, agent
        self._entries = self._leakable()
        self._memory: list[float] = []
        self._began, self._first = time.monotonic(), read(agent)

    def sample(self) -> None:
        """Read the memory. Call it in regular intervals during the run."""
        self._memory.append(self.agent.rss_mb())

    def end(self) -> dict[str, float]:
        """Return the metrics of the agent's process at the end. Raises OSError if it was killed."""
        last, seconds = read(self.agent), time.monotonic() - self._began
        cores = (last.cpu_seconds - self._first.cpu_seconds) / seconds
        manifests = (last.manifests_seconds - self._first.manifests_seconds) / seconds
        return {
            "agent_cores": cores,
            "agent_cores_without_manifests": cores - manifests,
            "rss_begin_mb": self._first.rss_mb,
            "rss_middle_mb": self._memory[len(self._memory) // 2] if self._memory else last.rss_mb,
            "rss_end_mb": last.rss_mb,
            "descriptors_begin": self._first.descriptors,
            "descriptors_end": last.descriptors,
            "threads_begin": self._first.threads,
            "threads_end": last.threads,
        }

    def leaks(self, patience: float = _PATIENCE) -> dict[str, int]:
        """Return the leaked entries, once all objects are as at the begin.

        Wait up to `patience` seconds until there are none: replaced entries are freed after a grace period.
        Empty if the agent has no BPF maps now or had none.
        """
        deadline = time.monotonic() + patience
        while True:
            now = self._leakable()
            leaked = {name: now[name] - count for name, count in self._entries.items() if name in now}
            if not any(leaked.values()) or time.monotonic() >= deadline:
                return {f"leaked_{name}": count for name, count in leaked.items()}
            time.sleep(_STEP)

    def _leakable(self) -> dict[str, int]:
        entries = map_entries(self._node)
        return {name: entries[name] for name in LEAKABLE if name in entries}
