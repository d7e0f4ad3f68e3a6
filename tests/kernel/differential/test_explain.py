"""What `ebpfproxy explain` predicts, compared with real connections through random histories of Services.

The predictions come from the plan, the routes and the devices of the node, not from the kernel's Service
tables. So a difference is an error of the explanation or of the mode. In mode ebpf, the explanation by the
maps alone, as for a saved dump, must give the same endpoints.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.backends.selection import MODES
from ebpfproxy.diagnose.cluster import Cluster
from ebpfproxy.diagnose.explain.connection import explain
from ebpfproxy.diagnose.explain.from_tables import situation_of as maps_situation
from ebpfproxy.diagnose.explain.host import route_to
from ebpfproxy.diagnose.explain.origin import Origin
from ebpfproxy.diagnose.explain.result import ClientClass, Destination, Explanation, Verdict
from ebpfproxy.diagnose.situation import Situation, situation_of_mode
from ebpfproxy.model.address import Address, format_address, parse_address
from tests.kernel.clients import REFUSED, SILENT
from tests.kernel.differential.conftest import SUBJECTS
from tests.kernel.differential.dialers import Dial
from tests.kernel.differential.expected import World, name_of
from tests.kernel.differential.history import (
    NOTHING,
    Change,
    Step,
    advance,
    histories,
    history_of_differences,
)
from tests.kernel.differential.places import ADDRESSES, CLIENTS, OTHER_NODE, SERVERS
from tests.kernel.differential.subject import Subject
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.support.reference import SOURCES

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]

UNUSED_PORT = 81
_MOST_OF_STEP = 40
"""Connections in each step, so that there are many different states."""

_CIDRS = ",".join(ADDRESSES.all_pods)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ebpf-host": ("ebpf", {"socket_lb": "host", "iptables_localhost_nodeports": "false"}),
    "ebpf-redirect": ("ebpf", {"ebpf_redirect": "true", "nodeport_addresses": ("primary",)}),
    "nftables-all": (
        "nftables",
        {"detect_local_mode": "ClusterCIDR", "cluster_cidr": _CIDRS, "masquerade_all": "true"},
    ),
    "nftables-primary": (
        "nftables",
        {"detect_local_mode": "ClusterCIDR", "cluster_cidr": _CIDRS, "nodeport_addresses": ("primary",)},
    ),
    "iptables-undetected": (
        "iptables",
        {"detect_local_mode": "ClusterCIDR", "iptables_backend": "nft", "masquerade_all": "true"},
    ),
    "iptables-addresses": (
        "iptables",
        {
            "iptables_backend": "legacy",
            "iptables_localhost_nodeports": "false",
            "nodeport_addresses": ("172.16.0.0/12", "fd00:172::/32"),
        },
    ),
    "ipvs-primary": ("ipvs", {"iptables_backend": "legacy", "nodeport_addresses": ("primary",)}),
    "userspace-primary": (
        "userspace",
        {
            **SUBJECTS["userspace"][1],
            "detect_local_mode": "ClusterCIDR",
            "cluster_cidr": _CIDRS,
            "nodeport_addresses": ("primary",),
        },
    ),
    "userspace-without-localhost": (
        "userspace",
        {**SUBJECTS["userspace"][1], "iptables_localhost_nodeports": "false"},
    ),
}
"""Modes with options that the explanation depends on."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        named = metafunc.config.getoption("--subjects")
        modes = {SUBJECTS[each][0] for each in (named.split(",") if named else SUBJECTS)}
        metafunc.parametrize("variant", [name for name, (mode, _) in VARIANTS.items() if mode in modes])


_VERDICTS = {
    Verdict.REJECTED: frozenset({REFUSED}),
    Verdict.DROPPED: frozenset({SILENT}),
    Verdict.REJECTED_OR_DROPPED: frozenset({REFUSED, SILENT}),
    Verdict.REACHES_NODE: frozenset({REFUSED}),  # no process of the node listens on these ports
}
_HOSTS = frozenset(parse_address(text) for text in OTHER_NODE)


class Asked(NamedTuple):
    """A connection, and what the explanation says about it."""

    source: str
    destination: Destination
    explanation: Explanation

    @property
    def dial(self) -> Dial:
        assert self.destination.protocol
        address = format_address(self.destination.address)
        return Dial(self.destination.protocol, address, self.destination.port)

    @property
    def allowed(self) -> frozenset[str]:
        """All outcomes that the client may get."""
        found = self.explanation
        if found.verdict is Verdict.ROUTED:
            return frozenset({REFUSED if self.destination.address in _HOSTS else SILENT})
        if found.verdict is not Verdict.CONNECTS:
            return _VERDICTS[found.verdict]
        answers = set()
        for each in found.endpoints:
            if each.used and each.works:
                answers |= {
                    f"{name_of((each.address, each.port))} {format_address(seen)}" for seen in each.seen
                }
            elif each.used:
                answers.add(SILENT)
        return frozenset(answers)


class Comparison:
    """The connections of one subject, up to `most`. Each history begins where the previous one ended."""

    def __init__(self, subject: Subject, most: int, of_step: int = _MOST_OF_STEP) -> None:
        self.subject = subject
        self.most = most
        self.of_step = of_step
        self.compared = 0
        self._world = World(NOTHING)
        self._random = random.Random(0)

    def run(self, history: tuple[Step, ...]) -> None:
        """Raises AssertionError with a line for each wrong outcome."""
        for step in history:
            if self.compared >= self.most:
                return
            change = advance(self._world.state, step)
            self._world = World(change.state, self._world)
            wrong = self.subject.submit(lambda change=change: list(self._step(change))).result()  # type: ignore[misc]
            assert not wrong, "\n".join(["", *wrong[:20]])

    def _step(self, change: Change) -> Iterator[str]:
        """In the control thread, which is in the node's network namespace."""
        self.subject.apply(change)
        situation = situation_of(self.subject)
        maps = situation_of_maps(self.subject)
        destinations = self._destinations()
        self._random.shuffle(destinations)
        asked: dict[str, list[Asked]] = {source: [] for source in SOURCES}
        for source, destination in destinations[: min(self.of_step, self.most - self.compared)]:
            explanation = explain(situation, origin_of(source, situation), destination)
            asked[source].append(Asked(source, destination, explanation))
            if maps:
                by_maps = choices(explain(maps, origin_of(source, situation), destination))
                if by_maps != choices(explanation):
                    yield f"{source} to {destination}: {by_maps} by the maps, not {choices(explanation)}"
        for source, some in asked.items():
            self.subject.dialers[source].dial([[each.dial for each in some]])
        for source, some in asked.items():
            for each, outcome in zip(some, self.subject.dialers[source].result(), strict=True):
                self.compared += 1
                if outcome not in each.allowed:
                    yield f"{source} to {each.destination}: {outcome}, not {sorted(each.allowed)}:"
                    yield from (f"  {step.reason.word}: {step.text}" for step in each.explanation.steps)

    def _destinations(self) -> list[tuple[str, Destination]]:
        """The frontends, those of the previous step, and unused ports of their addresses."""
        found = {
            (case.source, Destination(case.address, port, case.protocol))
            for case in self._world.cases
            for port in (case.port, UNUSED_PORT)
        }
        return sorted(found)


def situation_of(subject: Subject) -> Situation:
    """The situation that commands have: the plan of the subject's state, and the devices that keep programs
    which Services needed in earlier steps. Call it in the node's network namespace."""
    with contextlib.closing(subject.inspect()) as inspection:
        return situation_of_mode(
            Cluster(subject.state, ()), inspection, subject.mode, subject.config, route_to
        )


def situation_of_maps(subject: Subject) -> Situation | None:
    """What the maps of mode ebpf describe; None in other modes."""
    if subject.mode != "ebpf":
        return None
    with contextlib.closing(View(subject.config.bpffs_root)) as view:
        return maps_situation(view, subject.config.node_name)


def choices(explanation: Explanation) -> tuple[str, list[str], str]:
    """The verdict, the usable endpoints, and the Service."""
    used = sorted(str(each) for each in explanation.endpoints if each.used)
    return explanation.verdict.value, used, explanation.service


def origin_of(source: str, situation: Situation) -> Origin:
    pair = CLIENTS[source]
    addresses: tuple[Address, ...] = tuple(map(parse_address, (pair.v4, pair.v6)))
    kind = ClientClass(source)
    if kind is not ClientClass.POD:
        return Origin(kind, source, () if kind is ClientClass.NODE else addresses)
    route = situation.routes(addresses[0])
    device = situation.device(route.ifindex) if route else None
    assert device
    return Origin(kind, SERVERS[0].name, addresses, device.name, device.ifindex)


def test_explanations_agree_with_real_connections(
    subject: Subject,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    """A few connections, always the same ones, or --explained of each subject. --junitxml=FILE records the
    number."""
    many: int = pytestconfig.getoption("--explained")
    record_property(f"{subject.name} connections", compare(subject, many))


def test_explanations_agree_with_real_connections_for_other_options(
    variant: str, pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --subjects, those of the same modes."""
    mode, texts = VARIANTS[variant]
    skip_without_ipvs(mode)
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables"))
    processor = min(os.sched_getaffinity(0))
    with Subject(variant, next(each for each in MODES if each.name == mode), texts, processor) as subject:
        compare(subject, pytestconfig.getoption("--explained"))


def compare(subject: Subject, many: int) -> int:
    """Compare that many connections, and return the number. Raises AssertionError."""
    comparison = Comparison(subject, many)

    @settings(
        max_examples=10 + many // 20,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(histories())
    def follow(history: tuple[Step, ...]) -> None:
        comparison.run(history)

    follow()
    assert comparison.compared == many
    return comparison.compared


def test_explanations_of_all_differences_between_modes_agree_with_real_connections(
    subject: Subject,
) -> None:
    comparison = Comparison(subject, 1_000_000, of_step=1_000_000)
    comparison.run(history_of_differences())
    assert comparison.compared
