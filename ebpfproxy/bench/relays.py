"""The benchmark relays: memory of the relays of mode userspace, with many connections."""

from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.userspace.messages import NAME
from ebpfproxy.bench import workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, side_by_side
from ebpfproxy.lab import Agent, Lab
from ebpfproxy.lab.agent import memory_mb
from ebpfproxy.linux.processes import children

MODE, PATH = "userspace", "clusterip"
FAILURES = frozenset({"held_unopened", "held_silent"})


class Size(NamedTuple):
    """The extent of a run: connections that are held, and those that are opened before and meanwhile."""

    held: int
    samples: int


def run(size: Size, progress: Progress) -> Iterator[Result]:
    """Measure a node with one Service. Raises EbpfProxyError. Metrics:

    - relays_rss_mb, relays_rss_held_mb: memory of all relays in MB of 10^6 bytes, before and while the
      connections are held;
    - crr_us, crr_held_us: a connection with one byte and its answer, before and meanwhile;
    - held_unopened, held_silent: connections that could not be opened, and that did not answer at the end.
    """
    samples = Samples([MODE], 1)
    with side_by_side([MODE], _Testbed, progress) as (side,):
        testbed, (agent,) = side.testbed, side.agents
        samples.add(MODE, PATH, "crr_us", 0, testbed.measure(size.samples))
        samples.add(MODE, PATH, "relays_rss_mb", 0, [memory(agent)])
        progress(f"holding {size.held} connections")
        held, opened = testbed.load.hold(testbed.client, testbed.targets, size.held)
        samples.add(MODE, PATH, "relays_rss_held_mb", 0, [memory(agent)])
        samples.add(MODE, PATH, "crr_held_us", 0, testbed.measure(size.samples))
        ends = testbed.load.end_churn(held, timeout=120.0)
        samples.count(MODE, PATH, "held_unopened", opened["failed"], size.held)
        samples.count(MODE, PATH, "held_silent", ends["failed"] - opened["failed"], size.held)
    yield from samples.results()


class _Testbed:
    """A server pod, a client pod, and one Service."""

    def __init__(self, lab: Lab) -> None:
        self.load = Load(lab.folder)
        workload.write(lab.folder / "manifests", 1, 2)
        workload.server_pod(lab, self.load)
        self.client = lab.pod("client")
        self.targets = self.load.targets(PATH, workload.service_targets(1))

    def measure(self, count: int) -> list[float]:
        """Return microseconds of connections with one byte and its answer."""
        (durations,) = self.load.measure(self.client, "crr", self.targets, count)
        return [each / 1000 for each in durations]


def pids(agent: Agent) -> list[int]:
    """Return the process IDs of an agent's relays."""
    return [each.pid for each in children(agent.process.pid) if each.name == NAME]


def memory(agent: Agent) -> float:
    """Return the resident memory of an agent's relays together, in MB of 10^6 bytes. Pages that they share
    count for each.
    """
    return sum(memory_mb(pid, "VmRSS") for pid in pids(agent))
