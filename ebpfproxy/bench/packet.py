"""Nanoseconds that our classifiers take for a packet, by the kernel's own clock (BPF_PROG_TEST_RUN).

The kernel runs a program many times on one packet, each time on what the last run left of it. So that
each run translates, two entries of `flows` send the packet to and fro. All is hot in the caches then,
as in a stream; of what a packet costs that comes alone it says nothing.

Programs are compiled anew here, since a mark that lasts from one test run's begin to its end has to be
in skb->cb, not in skb->tc_index, and with programs of packet.c beside them; maps are those of an agent.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from socket import IPPROTO_TCP, IPPROTO_UDP, htons, if_nametoindex
from typing import NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.connect import Progress
from ebpfproxy.bench.frames import HERE, Tuple, frame, tuple_of
from ebpfproxy.bench.load import LoadFailed
from ebpfproxy.bench.report import Result, result
from ebpfproxy.dataplanes.ebpf import abi, features
from ebpfproxy.dataplanes.ebpf.devices import classifier
from ebpfproxy.dataplanes.ebpf.entries import EGRESS, INGRESS
from ebpfproxy.dataplanes.ebpf.flow_state import Flow
from ebpfproxy.dataplanes.ebpf.hooks import SCHED_CLS
from ebpfproxy.dataplanes.ebpf.maps import Maps, MapSizes
from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.kernel import netns
from ebpfproxy.kernel.bpf import Program
from ebpfproxy.kernel.compiler import ProgramSpec, build
from ebpfproxy.kernel.test_runs import TestRuns
from ebpfproxy.lab import Lab
from ebpfproxy.model.address import Address, parse_address

_BESIDE = Path(__file__).with_name("packet.c")
_INGRESS, _EGRESS = classifier(0, INGRESS), classifier(0, EGRESS)
_PROGRAMS = (
    _INGRESS,
    _EGRESS,
    "floor_of_all",
    "ingress_unmarked",
    "egress_unmarked",
    "egress_forward_marked",
    "egress_reply_marked",
    "floor_of_new_flow",
    "new_flow",
)
_PASS_ON = -1
_ESTABLISHED = abi.FLOW_REPLIED | abi.FLOW_ESTABLISHED
_MASQUERADED = _ESTABLISHED | abi.FLOW_MASQUERADE
_NO_ADDRESS = Address(bytes(16))
_NEW_FLOWS = 200_000
"""In all rounds together: in a table of 524 288, with two entries each, none is evicted for another."""


class Case(NamedTuple):
    """`path` is where the packet is seen and its family. `flows`: entries that send it to and fro."""

    metric: str
    path: str
    program: str
    frame: bytes
    forwarded: bool = True
    flows: Mapping[bytes, Flow] = {}


def run(sizes: Sequence[int], endpoints: int, runs: int, rounds: int, progress: Progress) -> Iterator[Result]:
    """Every case with maps of so many services: see `cases` and `_new_flows`. Each figure is the mean of
    `runs` runs; p50 is that of `rounds` of them, in which cases take turns. Nothing is subtracted, but the
    floor of `floor_of_new_flow` from new_flow_ns. Raises EbpfProxyError.
    """
    for services in sizes:
        with Lab("bench") as lab:
            progress(f"{services} services with {endpoints} endpoints each")
            maps, programs = _prepare(lab, services, endpoints)
            try:
                with netns.entered(lab.node.netns):
                    yield from _measure(maps, programs, services, runs, rounds, progress)
            finally:
                maps.close()
                for program in programs.values():
                    program.close()


def _prepare(lab: Lab, services: int, endpoints: int) -> tuple[Maps, dict[str, Program]]:
    """Maps as an agent fills them, which is gone then, so that nobody else writes; and the programs."""
    folder = lab.folder / "manifests"
    workload.write(folder, services, endpoints)
    lab.ip(lab.node, f"link set eth0 address {HERE}")
    lab.agent(folder, "--proxy-mode=ebpf", wait=600).kill()
    layout = Pins(lab.bpffs).hooked_in()
    pins = layout / "bench"
    build(
        abi.source_directory() / "tc.c",
        MapSizes().defines() | features.defines() | {"MARK_IN_CB": "1"},
        tuple(ProgramSpec(name, SCHED_CLS, 0) for name in _PROGRAMS),
        layout / "maps",
        pins,
        beside=(_BESIDE,),
    )
    return Maps(layout / "maps"), {name: Program.pinned(pins / name) for name in _PROGRAMS}


def _measure(
    maps: Maps, programs: Mapping[str, Program], services: int, runs: int, rounds: int, progress: Progress
) -> Iterator[Result]:
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
    samples: list[list[float]] = [[] for _ in every]
    for number in range(rounds):
        progress(f"{services} services, round {number + 1} of {rounds}")
        for case, test, figures in zip(every, tests, samples, strict=True):
            figures.append(test.measure(case.frame, runs).duration_ns)
    for case, figures in zip(every, samples, strict=True):
        yield result("ebpf", case.path, services, case.metric, figures)
    yield from _new_flows(programs, uplink, services, runs, rounds)


def _check(case: Case, test: TestRuns) -> None:
    """What is measured has to be what is meant: a translation to and fro, or none."""
    once, twice = test.measure(case.frame, 1), test.measure(case.frame, 2)
    moved = tuple_of(once.packet) != tuple_of(case.frame)
    if once.verdict != _PASS_ON or moved != bool(case.flows) or twice.packet != case.frame:
        raise LoadFailed(f"{case.metric} at {case.path}: the program does something else than is measured")


def cases() -> Iterator[Case]:
    """- floor_ns: a program that does nothing;
    - no_service_ack_ns, _syn_ns, _udp_ns: of nobody's interest; "own": sent by the node itself;
    - flow_ns, flow_port_ns: of an established flow, from the client, to another port or not;
    - masquerade_ns: the same, on its way out to another node;
    - reply_ns: back to the client, from an endpoint here; reply_masqueraded_ns: from another node's.
    """
    yield Case("floor_ns", "", "floor_of_all", _no_service("4", "ack"))
    for family in ("4", "6"):
        for kind in ("ack", "syn", "udp"):
            plain = _no_service(family, kind)
            yield Case(f"no_service_{kind}_ns", f"ingress-v{family}", _INGRESS, plain)
            yield Case(f"no_service_{kind}_ns", f"egress-v{family}", _EGRESS, plain)
            yield Case(f"no_service_{kind}_ns", f"egress-own-v{family}", _EGRESS, plain, forwarded=False)
        yield from _established(family)


def _no_service(family: str, kind: str) -> bytes:
    source, destination = {
        "4": ("198.51.100.7", "203.0.113.9"),
        "6": ("2001:db8:1::7", "2001:db8:2::9"),
    }[family]
    protocol = IPPROTO_UDP if kind == "udp" else IPPROTO_TCP
    ends = Tuple(parse_address(source), 40001, parse_address(destination), 443)
    return frame(ends, protocol, syn=kind == "syn")


class _Parties(NamedTuple):
    """Addresses of one flow: `m` is the node's, which another node's endpoint sees."""

    c: Address
    f: Address
    e: Address
    m: Address


_PARTIES = {
    "4": _Parties(*map(parse_address, ("192.0.2.5", "10.96.0.1", "10.244.2.2", "172.18.0.2"))),
    "6": _Parties(*map(parse_address, ("2001:db8::5", "fd00:96::1", "fd00:244:2::2", "fd00:172:18::2"))),
}


def _established(family: str) -> Iterator[Case]:
    """Ports differ from case to case, since all entries are there at once."""
    c, f, e, m = _PARTIES[family]
    yield _to_and_fro("flow_ns", f"ingress-v{family}", Tuple(c, 4001, f, 80), Tuple(c, 4001, e, 80))
    yield _to_and_fro("flow_port_ns", f"ingress-v{family}", Tuple(c, 4002, f, 80), Tuple(c, 4002, e, 8080))
    yield _to_and_fro(
        "reply_masqueraded_ns", f"ingress-v{family}", Tuple(e, 8080, m, 4003), Tuple(e, 8080, c, 4003)
    )
    yield _to_and_fro("masquerade_ns", f"egress-v{family}", Tuple(c, 4004, e, 8080), Tuple(m, 4004, e, 8080))
    yield _to_and_fro("reply_ns", f"egress-v{family}", Tuple(e, 8080, c, 4005), Tuple(f, 80, c, 4005))
    yield _to_and_fro(
        "reply_masqueraded_ns", f"egress-v{family}", Tuple(e, 8080, c, 4006), Tuple(f, 80, c, 4006)
    )


_KINDS = {
    ("flow_ns", "ingress"): "ingress_unmarked",
    ("flow_port_ns", "ingress"): "ingress_unmarked",
    ("reply_masqueraded_ns", "ingress"): "ingress_unmarked",
    ("masquerade_ns", "egress"): "egress_forward_marked",
    ("reply_ns", "egress"): "egress_unmarked",
    ("reply_masqueraded_ns", "egress"): "egress_reply_marked",
}


def _to_and_fro(metric: str, path: str, one: Tuple, other: Tuple) -> Case:
    side = path.partition("-")[0]
    flows = dict(_entry(metric, side, here, there) for here, there in ((one, other), (other, one)))
    return Case(metric, path, _KINDS[metric, side], frame(one, IPPROTO_TCP), flows=flows)


def _entry(metric: str, side: str, seen: Tuple, becomes: Tuple) -> tuple[bytes, Flow]:
    """The entry by which a packet `seen` at a side becomes another one."""
    if side == "ingress":
        key = _key(seen, abi.AT_INGRESS)
        if metric == "reply_masqueraded_ns":
            return key, _flow(abi.FROM_ENDPOINT, _MASQUERADED, Tuple(*becomes[2:], *seen[2:]), seen[:2])
        return key, _flow(abi.FROM_CLIENT, _ESTABLISHED, seen, becomes[2:])
    if metric == "masquerade_ns":  # found by what will come back
        dialed = Tuple(*seen[:2], *seen[2:])
        key = _key(Tuple(*seen[2:], *seen[:2]), abi.AT_EGRESS)
        flow = _flow(abi.BETWEEN, _MASQUERADED, dialed, seen[2:])
        return key, flow._replace(masquerade=becomes.source, masquerade_port=htons(becomes.source_port))
    flags = _MASQUERADED if metric == "reply_masqueraded_ns" else _ESTABLISHED
    dialed = Tuple(*becomes[2:], *becomes[:2])
    return _key(seen, abi.AT_EGRESS), _flow(abi.BETWEEN, flags, dialed, seen[:2])


def _key(ends: Tuple, side: int) -> bytes:
    ports = htons(ends.source_port), htons(ends.destination_port)
    return abi.FLOW_KEY.pack(ends.source, ends.destination, *ports, IPPROTO_TCP, side, 0)


def _flow(way: int, flags: int, dialed: Tuple, endpoint: tuple[Address, int]) -> Flow:
    """Of service 1, which is there. `dialed`: from the client to the frontend."""
    return Flow(
        client=dialed.source,
        frontend=dialed.destination,
        endpoint=endpoint[0],
        masquerade=_NO_ADDRESS,
        client_port=htons(dialed.source_port),
        frontend_port=htons(dialed.destination_port),
        endpoint_port=htons(endpoint[1]),
        between_port=htons(dialed.source_port),
        masquerade_port=0,
        flags=flags,
        service_id=1,
        endpoint_id=1,
        protocol=IPPROTO_TCP,
        way=way,
        pad=0,
        last_seen=0,
    )


def _new_flows(
    programs: Mapping[str, Program], uplink: int, services: int, runs: int, rounds: int
) -> Iterator[Result]:
    """- new_flow_ns: a client's first packet, where the table has room;
    - new_flow_full_ns: where another flow has to go for each.

    Each run is of another client. What it takes to make its packet is measured, too, and taken off.
    """
    client = Tuple(parse_address("192.0.2.6"), 4000, parse_address(workload.cluster_ip(0)), workload.PORT)
    first = frame(client, IPPROTO_TCP, syn=True)
    new, floor = (
        TestRuns(programs[name], ifindex=uplink, ingress_ifindex=uplink)
        for name in ("new_flow", "floor_of_new_flow")
    )

    if client.destination[12:] in new.measure(first).packet:
        raise LoadFailed("new_flow_ns: the program opens no flow")

    def sample(count: int) -> float:
        return float(new.measure(first, count).duration_ns - floor.measure(first, count).duration_ns)

    few = max(1, min(runs, _NEW_FLOWS // rounds))
    yield result("ebpf", "ingress-v4", services, "new_flow_ns", [sample(few) for _ in range(rounds)])
    new.measure(first, runs)
    yield result("ebpf", "ingress-v4", services, "new_flow_full_ns", [sample(runs) for _ in range(rounds)])
