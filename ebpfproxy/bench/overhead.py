"""What traffic that is no Service's pays for our programs on its way."""

import collections
import functools
from collections.abc import Callable, Iterator, Mapping
from socket import if_nameindex
from typing import NamedTuple

from ebpfproxy.bench import iperf, workload
from ebpfproxy.bench.connect import Progress
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.report import Result, result
from ebpfproxy.dataplanes.ebpf.hooks import CLASSIFIERS
from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.kernel import netns, tc
from ebpfproxy.kernel.bpf import Program
from ebpfproxy.kernel.tc import Side
from ebpfproxy.lab import Lab, Node, Pod, PodNetwork

BARE, UPLINKS, PODS = "bare", "uplinks", "pods"
STATES = {UPLINKS: "on", PODS: "host"}
"""Which devices have programs, beside none of them: those that an agent chooses with this --socket-lb."""

_PATIENCE = 600.0
DATAGRAMS = 400
"""Of UDP for each megabyte of TCP: both take about the same time."""

_SERVICES, _ENDPOINTS = 100, 10
_TURNS = 16
"""Into how many parts the exchanges of a round are split: states take turns among them."""

Filter = tuple[int, Side]
"""A device by ifindex, and a side."""

Chosen = dict[str, dict[str, dict[Filter, Program]]]
"""By node and state."""

Samples = dict[tuple[str, str, str], list[float]]
"""By way, state and metric; the n-th of each is of the n-th turn."""


class Way(NamedTuple):
    """From a pod to a pod."""

    name: str
    client: Pod
    server: Pod


def run(rounds: int, megabytes: int, samples: int, mode: str, progress: Progress) -> Iterator[Result]:
    """From pod to pod on one node and across two, in every state; `rounds` of all of them. By round:

    - tcp_mbit_s: one stream of iperf3, of `megabytes`;
    - udp_per_s: datagrams of 64 bytes that arrive of so many that one sender sends, DATAGRAMS for each of the
      megabytes;
    - rr_per_s: one byte there and back, one after another; of `samples` in all rounds;
    - ..._ratio: each of them over that of the same turn without programs.

    Agents have ended by then: the kernel goes on without them. Raises EbpfProxyError.
    """
    iperf.require()
    with Lab("bench", pods=PodNetwork.ROUTED) as lab:
        load = Load(lab.folder)
        first, second = lab.nodes
        client, near, far = first.pod("client"), first.pod("near"), second.pod("far")
        for server in (near, far):
            load.serve(server, workload.ENDPOINT_PORT)
            iperf.serve(server)
        workload.write(lab.folder / "manifests", _SERVICES, _ENDPOINTS)
        progress("both agents, once with each --socket-lb")
        attached = _chosen(lab, mode)
        ways = [Way("one-node", client, near), Way("two-nodes", client, far)]
        found: Samples = collections.defaultdict(list)
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            _round(lab, ways, attached, load, megabytes, max(1, samples // rounds), number, found)
    yield from results(found, mode)


def results(found: Samples, mode: str) -> Iterator[Result]:
    for (way, state, metric), figures in found.items():
        yield result(mode, f"{way}-{state}", _SERVICES, metric, figures)
    for (way, state, metric), figures in found.items():
        if state != BARE:
            bare = found[way, BARE, metric]
            ratios = [one / other for one, other in zip(figures, bare, strict=True)]
            yield result(mode, f"{way}-{state}", _SERVICES, f"{metric}_ratio", ratios)


def _chosen(lab: Lab, mode: str) -> Chosen:
    """What agents attach in each state; what they did in the last one is still there."""
    chosen: Chosen = {node.name: {} for node in lab.nodes}
    for state, socket_lb in STATES.items():
        flags = (f"--proxy-mode={mode}", f"--socket-lb={socket_lb}")
        agents = [node.agent(lab.folder / "manifests", *flags, wait=0) for node in lab.nodes]
        for node, agent in zip(lab.nodes, agents, strict=True):
            agent.await_sync(timeout=_PATIENCE)
            agent.kill()
            chosen[node.name][state] = _filters(node)
    return chosen


def _filters(node: Node) -> dict[Filter, Program]:
    found = {}
    with netns.entered(node.host.netns):
        programs = {program.id: program for program in _pinned(node)}
        for ifindex, _ in if_nameindex():
            for side in Side:
                running = tc.program_id(ifindex, side)
                if running is not None:
                    found[ifindex, side] = programs[running]
    return found


def _pinned(node: Node) -> Iterator[Program]:
    for folder in Pins(node.bpffs).hooked_in().glob("programs_*"):
        for name in CLASSIFIERS:
            yield Program.pinned(folder / name)


def _set(node: Node, wanted: Mapping[Filter, Program]) -> None:
    """Have these filters on the node and no others, and clsact nowhere else."""
    with netns.entered(node.host.netns):
        for ifindex, _ in if_nameindex():
            for side in Side:
                if (ifindex, side) in wanted:
                    if tc.program_id(ifindex, side) is None:
                        tc.attach(ifindex, side, wanted[ifindex, side])
                else:
                    tc.detach(ifindex, side)
            tc.remove_clsact(ifindex)


def _round(
    lab: Lab,
    ways: list[Way],
    attached: Chosen,
    load: Load,
    megabytes: int,
    samples: int,
    number: int,
    found: Samples,
) -> None:
    """States take turns at each metric, since the machine drifts; each round begins with another one."""
    states = [BARE, *STATES]
    order = states[number % len(states) :] + states[: number % len(states)]
    for way in ways:
        address = way.server.v4
        targets = load.targets(way.name, [(address, workload.ENDPOINT_PORT)])
        metrics: dict[str, Callable[[], float]] = {
            "tcp_mbit_s": functools.partial(iperf.megabits, way.client, address, megabytes),
            "udp_per_s": functools.partial(iperf.datagrams, way.client, address, megabytes * DATAGRAMS),
        }
        for metric, measure in metrics.items():
            for state in order:
                _set_all(lab, attached, state)
                found[way.name, state, metric].append(measure())
        for turn in range(_TURNS):
            for state in order:
                _set_all(lab, attached, state)
                (took,) = load.measure(way.client, "rr", targets, max(1, samples // _TURNS), seed=turn)
                found[way.name, state, "rr_per_s"].append(1e9 * len(took) / sum(took))


def _set_all(lab: Lab, attached: Chosen, state: str) -> None:
    for node in lab.nodes:
        _set(node, attached[node.name].get(state, {}))
