"""Measure the duration of the tc programs for a packet with the kernel's clock (BPF_PROG_TEST_RUN).

The kernel runs a program many times on one packet, each time on the result of the previous run. All data is
in the CPU caches then, as in a stream. The figures are not valid for a packet that comes alone.

The programs are compiled for this benchmark, together with packet.c. Their mark must last for one test run,
so it is in skb->cb, not in skb->tc_index. The maps are those of an agent.
"""

import struct
import time
from collections.abc import Mapping
from pathlib import Path
from socket import IPPROTO_TCP, if_nametoindex, ntohs
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi, features
from ebpfproxy.backends.ebpf.flows.state import Flow, unit_now
from ebpfproxy.backends.ebpf.hooks import SCHED_CLS, TAIL_CALLS
from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES, Maps, MapSizes
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.bench import workload
from ebpfproxy.bench.load import LoadFailed
from ebpfproxy.bench.modes import EBPF
from ebpfproxy.bench.packet_cases import (
    ETHERNET_ADDRESS,
    FLOOR_OF_NEW_FLOW,
    NEW_FLOW,
    PROGRAMS,
    Case,
    Tuple,
    cases,
    frame,
    node_addresses,
    tuple_of,
)
from ebpfproxy.bench.samples import Samples
from ebpfproxy.bench.sides import PATIENCE, Progress, start
from ebpfproxy.lab import Lab
from ebpfproxy.linux.bpf import compiler
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.loader import ProgramSpec, load_and_pin
from ebpfproxy.linux.bpf.test_run import TestRuns
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import parse_address

_FURTHER_PROGRAMS = Path(__file__).with_name("packet.c")
_PASS_ON = -1
_NEW_FLOWS = 20_000
"""New flows in all rounds together. The map of half-open flows has room for 32,768, so none is evicted."""
_U32 = struct.Struct("=I")


class Size(NamedTuple):
    """The extent of a run: `rounds` figures for each case, each the mean of `runs` runs. Cases alternate."""

    services: int
    endpoints: int
    runs: int
    rounds: int


def run(size: Size, samples: Samples, progress: Progress) -> None:
    """Measure every case: see `cases` and `_measure_new_flows`. Raises EbpfProxyError.

    Only the duration of preparing a packet is subtracted: see `Case.floor`.
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
    """Return maps filled by an agent, and the programs. The agent has ended and no longer writes."""
    workload.write(lab.folder / "manifests", size.services, size.endpoints)
    lab.ip(lab.node, f"link set eth0 address {ETHERNET_ADDRESS}")
    (agent,) = start(lab, EBPF)
    agent.await_sync(timeout=PATIENCE)
    agent.kill()
    layout = Pins(lab.bpffs).hooked_in()
    pins = layout / "bench"
    sources = abi.source_directory() / "tc.c", _FURTHER_PROGRAMS
    defines = COMPILED_SIZES.defines() | {"MARK_IN_CB": "1"}
    file, _ = compiler.compiled(sources, defines)
    numbers = MapSizes().numbers() | features.numbers(features.present())
    specs = tuple(ProgramSpec(name, SCHED_CLS, 0) for name in (*PROGRAMS, *TAIL_CALLS))
    load_and_pin(file, specs, numbers, layout / "maps", pins, TAIL_CALLS)
    return Maps(layout / "maps"), {name: Program.pinned(pins / name) for name in PROGRAMS}


def _measure(
    maps: Maps, programs: Mapping[str, Program], size: Size, samples: Samples, progress: Progress
) -> None:
    uplink = if_nametoindex("eth0")
    all_cases = list(cases())
    tests = [
        TestRuns(programs[case.program], ifindex=uplink, ingress_ifindex=uplink if case.forwarded else 0)
        for case in all_cases
    ]
    floors = [TestRuns(programs[case.floor], ifindex=uplink) if case.floor else None for case in all_cases]
    _write_device(maps, uplink)
    for case, test in zip(all_cases, tests, strict=True):
        for flow in case.flows:
            _write_flow(maps, flow)
        _check(case, test)
    for number in range(size.rounds):
        progress(f"test runs, round {number + 1} of {size.rounds}")
        for case, test, floor in zip(all_cases, tests, floors, strict=True):
            duration = test.measure(case.frame, size.runs).duration_ns
            if floor:
                duration -= floor.measure(case.frame, size.runs).duration_ns
            samples.add(EBPF, case.path, case.metric, number, [duration])


def _write_device(maps: Maps, uplink: int) -> None:
    """Give the device entry the addresses that masqueraded packets get."""
    *_, flags, _ = abi.DEVICE.unpack(maps["devices"].lookup(_U32.pack(uplink)) or bytes(abi.DEVICE.size))
    maps["devices"].update(_U32.pack(uplink), abi.DEVICE.pack(*node_addresses(), flags, bytes(6)))


def _write_flow(maps: Maps, flow: Flow) -> None:
    """Write both entries of a flow, and the uses of its ports."""
    now = unit_now(time.monotonic_ns())
    flow = flow._replace(client_seen=now, endpoint_seen=now)
    maps["flows"].update(*flow.entry())
    maps["replies"].update(*flow.reply_entry())
    for port, use in ((flow.frontend_port, "PORT_OF_FRONTEND"), (flow.endpoint_port, "PORT_OF_ENDPOINT")):
        line, at = divmod(ntohs(port), 64)
        key = _U32.pack(abi.CONSTANTS["PORTS_TCP"] * abi.CONSTANTS["FLOW_PORT_LINE"] + line)
        uses = bytearray(maps["flow_ports"].lookup(key) or bytes(abi.PORT_USES.size))
        uses[abi.CONSTANTS[use] + at] = 1
        maps["flow_ports"].update(key, bytes(uses))


def _check(case: Case, test: TestRuns) -> None:
    """Check that each run translates the packet, or that none does. Raises LoadFailed."""
    once, twice = test.measure(case.frame, 1), test.measure(case.frame, 2)
    translated = tuple_of(once.packet) != tuple_of(case.frame)
    expected = tuple_of(once.packet if case.floor else case.frame)
    if once.verdict != _PASS_ON or translated != bool(case.flows) or tuple_of(twice.packet) != expected:
        raise LoadFailed(f"{case.metric} at {case.path}: the program does not handle the packet as expected")


def _measure_new_flows(programs: Mapping[str, Program], size: Size, samples: Samples) -> None:
    """Measure the first packet of a flow.

    - new_flow_ns: the table has room;
    - new_flow_full_ns: each new flow evicts another one.

    Each run has another client. The duration of making its packet is measured and subtracted.
    """
    client = Tuple(parse_address("192.0.2.6"), 4000, parse_address(workload.cluster_ip(0)), workload.PORT)
    first = frame(client, IPPROTO_TCP, syn=True)
    uplink = if_nametoindex("eth0")
    new, floor = (
        TestRuns(programs[name], ifindex=uplink, ingress_ifindex=uplink)
        for name in (NEW_FLOW, FLOOR_OF_NEW_FLOW)
    )
    if client.destination[12:] in new.measure(first).packet:
        raise LoadFailed("new_flow_ns: the program creates no flow")

    def sample(metric: str, count: int) -> None:
        for number in range(size.rounds):
            duration = new.measure(first, count).duration_ns - floor.measure(first, count).duration_ns
            samples.add(EBPF, "ingress-v4", metric, number, [duration])

    sample("new_flow_ns", max(1, min(size.runs, _NEW_FLOWS // size.rounds)))
    new.measure(first, size.runs)
    sample("new_flow_full_ns", size.runs)
