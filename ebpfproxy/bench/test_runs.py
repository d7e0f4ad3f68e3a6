"""Nanoseconds that our classifiers take for a packet, by the kernel's own clock (BPF_PROG_TEST_RUN).

The kernel runs a program many times on one packet, each time on what the last run left of it. All is hot
in the caches then, as in a stream; of what a packet costs that comes alone it says nothing.

Programs are compiled anew here, since a mark that lasts from one test run's begin to its end has to be
in skb->cb, not in skb->tc_index, and with programs of packet.c beside them; maps are those of an agent.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from socket import IPPROTO_TCP, if_nametoindex
from typing import NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.frames import HERE, Tuple, frame, tuple_of
from ebpfproxy.bench.load import LoadFailed
from ebpfproxy.bench.modes import EBPF
from ebpfproxy.bench.packet_cases import FLOOR_OF_NEW_FLOW, NEW_FLOW, PROGRAMS, Case, cases
from ebpfproxy.bench.samples import Samples
from ebpfproxy.bench.sides import PATIENCE, Progress, start
from ebpfproxy.dataplanes.ebpf import abi, features
from ebpfproxy.dataplanes.ebpf.hooks import SCHED_CLS
from ebpfproxy.dataplanes.ebpf.maps import Maps, MapSizes
from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.kernel import netns
from ebpfproxy.kernel.bpf import Program
from ebpfproxy.kernel.compiler import ProgramSpec, build
from ebpfproxy.kernel.test_runs import TestRuns
from ebpfproxy.lab import Lab
from ebpfproxy.model.address import parse_address

_BESIDE = Path(__file__).with_name("packet.c")
_PASS_ON = -1
_NEW_FLOWS = 200_000
"""In all rounds together: in a table of 524 288, with two entries each, none is evicted for another."""


class Size(NamedTuple):
    """Each figure is the mean of `runs` runs, and there are `rounds` of them, in which cases take turns."""

    services: int
    endpoints: int
    runs: int
    rounds: int


def run(size: Size, samples: Samples, progress: Progress) -> None:
    """Every case: see `cases` and `_measure_new_flows`. Nothing is subtracted, but the floor of
    `floor_of_new_flow` from new_flow_ns. Raises EbpfProxyError.
    """
    with Lab("bench") as lab:
        maps, programs = _prepare(lab, size)
        try:
            with netns.entered(lab.node.netns):
                _measure(maps, programs, size, samples, progress)
                _measure_new_flows(programs, size, samples)
        finally:
            maps.close()
            for program in programs.values():
                program.close()


def _prepare(lab: Lab, size: Size) -> tuple[Maps, dict[str, Program]]:
    """Maps as an agent fills them, which is gone then, so that nobody else writes; and the programs."""
    workload.write(lab.folder / "manifests", size.services, size.endpoints)
    lab.ip(lab.node, f"link set eth0 address {HERE}")
    (agent,) = start(lab, EBPF)
    agent.await_sync(timeout=PATIENCE)
    agent.kill()
    layout = Pins(lab.bpffs).hooked_in()
    pins = layout / "bench"
    build(
        abi.source_directory() / "tc.c",
        MapSizes().defines() | features.defines() | {"MARK_IN_CB": "1"},
        tuple(ProgramSpec(name, SCHED_CLS, 0) for name in PROGRAMS),
        layout / "maps",
        pins,
        beside=(_BESIDE,),
    )
    return Maps(layout / "maps"), {name: Program.pinned(pins / name) for name in PROGRAMS}


def _measure(
    maps: Maps, programs: Mapping[str, Program], size: Size, samples: Samples, progress: Progress
) -> None:
    uplink = if_nametoindex("eth0")
    every = list(cases())
    tests = [
        TestRuns(programs[case.program], ifindex=uplink, ingress_ifindex=uplink if case.forwarded else 0)
        for case in every
    ]
    for case, test in zip(every, tests, strict=True):
        for key, flow in case.flows.items():
            maps["flows"].update(key, flow._replace(last_seen=time.monotonic_ns()).pack())
        _check(case, test)
    for number in range(size.rounds):
        progress(f"test runs, round {number + 1} of {size.rounds}")
        for case, test in zip(every, tests, strict=True):
            took = test.measure(case.frame, size.runs).duration_ns
            samples.add(EBPF, case.path, case.metric, number, [took])


def _check(case: Case, test: TestRuns) -> None:
    """What is measured has to be what is meant: a translation to and fro, or none."""
    once, twice = test.measure(case.frame, 1), test.measure(case.frame, 2)
    moved = tuple_of(once.packet) != tuple_of(case.frame)
    if once.verdict != _PASS_ON or moved != bool(case.flows) or twice.packet != case.frame:
        raise LoadFailed(f"{case.metric} at {case.path}: the program does something else than is measured")


def _measure_new_flows(programs: Mapping[str, Program], size: Size, samples: Samples) -> None:
    """- new_flow_ns: a client's first packet, where the table has room;
    - new_flow_full_ns: where another flow has to go for each.

    Each run is of another client. What it takes to make its packet is measured, too, and taken off.
    """
    client = Tuple(parse_address("192.0.2.6"), 4000, parse_address(workload.cluster_ip(0)), workload.PORT)
    first = frame(client, IPPROTO_TCP, syn=True)
    uplink = if_nametoindex("eth0")
    new, floor = (
        TestRuns(programs[name], ifindex=uplink, ingress_ifindex=uplink)
        for name in (NEW_FLOW, FLOOR_OF_NEW_FLOW)
    )
    if client.destination[12:] in new.measure(first).packet:
        raise LoadFailed("new_flow_ns: the program opens no flow")

    def sample(metric: str, count: int) -> None:
        for number in range(size.rounds):
            took = new.measure(first, count).duration_ns - floor.measure(first, count).duration_ns
            samples.add(EBPF, "ingress-v4", metric, number, [took])

    sample("new_flow_ns", max(1, min(size.runs, _NEW_FLOWS // size.rounds)))
    new.measure(first, size.runs)
    sample("new_flow_full_ns", size.runs)
