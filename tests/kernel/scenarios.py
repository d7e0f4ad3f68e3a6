"""Scenarios: what clients of Services get, step by step.

A scenario is a generator. It changes its Services, and then yields which client gets which answer. After the
yield its changes are in force, and it may test more. The runner advances all scenarios of a table together:
one sync applies a step of all of them, and all clients connect at the same time.
"""

import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from ebpfproxy.backends.ebpf.features import SET_RETVAL, present
from ebpfproxy.lab import Netns, Pod, sockets
from ebpfproxy.lab.manifests import Object
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import DENIED, REFUSED, SILENT, TCP, UDP, Dial, new_ports, outcome_of
from tests.kernel.cluster import Cluster, Exposed
from tests.kernel.differences import DIFFERENCES, Differences
from tests.support.foreign_sockets import creating_in

SILENCE = 0.3
"""Seconds to wait if no answer is expected."""
OFTEN = 40
"""Connections to find all of up to three endpoints: by chance, one is missed once in 10^6 runs."""
PORTS = {TCP: 80, UDP: 53}
_THREADS = 64
_LINES = 40  # of the log of the agent, shown after a failure


class Row(NamedTuple):
    """A client, what it dials, and the expected outcome: of `clients.outcome`, or the names of all endpoints
    that answer to many connections. An outcome without a space is compared with the answer's first word: some
    servers add the client's address to their name.

    `source`: the client's address, by default the one that its kernel selects.
    """

    client: Pod
    protocol: Protocol
    address: str
    port: int
    expected: str | frozenset[str]
    source: str = ""

    def __str__(self) -> str:
        source = f" from {self.source}" if self.source else ""
        return f"{self.client.name}{source} {self.protocol.name} {self.address} port {self.port}"


Steps = Generator[Iterable[Row], None, None]


class Stage:
    """The Services of one scenario."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.others: list[Object] = []
        self._webs: list[Exposed] = []

    @property
    def differences(self) -> Differences:
        return DIFFERENCES[self.cluster.mode]

    @property
    def clients(self) -> tuple[Pod, Pod]:
        """A pod and the node."""
        return self.cluster.p, self.cluster.node

    def service(self, *backends: Any, node_port: bool = False, **spec: Any) -> Exposed:
        """A Service that exists from the next step on, until `remove`."""
        web = self.cluster.service(node_port, **spec)
        web.backends = backends
        self.add(web)
        return web

    def add(self, web: Exposed) -> None:
        self._webs.append(web)

    def remove(self, web: Exposed) -> None:
        self._webs.remove(web)

    def objects(self) -> list[Object]:
        return [each for web in self._webs for each in web.objects()] + self.others

    # Rows

    def cluster_ip(self, web: Exposed, expected: str | set[str]) -> Iterator[Row]:
        """The pod and the node get this at the ClusterIPs, over both protocols."""
        for address in (web.v4, web.v6):
            yield from self.ports(address, expected)

    def ports(self, address: str, expected: str | set[str]) -> Iterator[Row]:
        """The pod and the node get this at the ports of a Service at this address."""
        for client in self.clients:
            for protocol, port in PORTS.items():
                yield self.row(client, protocol, address, port, expected)

    def node_port(self, web: Exposed, address: str, expected: str | set[str]) -> Iterator[Row]:
        """The pod and the node get this at the NodePort at this address."""
        for client in self.clients:
            for protocol in PORTS:
                yield self.row(client, protocol, address, web.node_port, expected)

    def row(
        self,
        client: Pod,
        protocol: Protocol,
        address: str,
        port: int,
        expected: str | set[str],
        source: str = "",
    ) -> Row:
        """`expected`: in all modes, except for the errors that the node's own datagrams cause."""
        if isinstance(expected, set):
            return Row(client, protocol, address, port, frozenset(expected), source)
        kind = "node" if client is self.cluster.node else "pod"
        return Row(client, protocol, address, port, self.differences.to(kind, protocol, expected), source)


StageT = TypeVar("StageT", bound=Stage)


class Scenarios(Generic[StageT]):
    """A table. As a decorator, it adds a scenario."""

    def __init__(self) -> None:
        self._modes: dict[Callable[[StageT], Steps], Sequence[str]] = {}

    def __call__(self, steps: Callable[[StageT], Steps]) -> Callable[[StageT], Steps]:
        """For all modes."""
        return self.only(*DIFFERENCES)(steps)

    def only(self, *modes: str) -> Callable[[Callable[[StageT], Steps]], Callable[[StageT], Steps]]:
        def add(steps: Callable[[StageT], Steps]) -> Callable[[StageT], Steps]:
            self._modes[steps] = modes
            return steps

        return add

    def run(
        self,
        cluster: Cluster,
        stage: Callable[[], StageT],
        restarts: Mapping[int, contextlib.AbstractContextManager[None]] = MappingProxyType({}),
    ) -> None:
        """Run the scenarios of the cluster's mode to their ends, each with a stage of its own. Fails with the
        rows that have another outcome.

        `restarts`, by the number of a step: within the block no agent runs, the scenarios continue, and their
        changes are written.
        """
        stages = {each: stage() for each, modes in self._modes.items() if cluster.mode in modes}
        with contextlib.ExitStack() as opened:
            running = {each: each(stage) for each, stage in stages.items()}
            for steps in running.values():
                opened.callback(steps.close)
            for number in itertools.count(1):
                with restarts.get(number, contextlib.nullcontext()):
                    step = {each: next(steps, None) for each, steps in running.items()}
                    running = {each: running[each] for each, rows in step.items() if rows is not None}
                    cluster.write("scenarios", *(one for each in running for one in stages[each].objects()))
                if not running:
                    return
                rows = [(each.__name__, row) for each in running for row in step[each] or ()]
                found = _outcomes(row for _, row in rows)
                if cluster.mode == "ebpf" and SET_RETVAL.name not in present():
                    # A hook rejects with EPERM.
                    found = {row: _without_eperm(row, answer) for row, answer in found.items()}
                wrong = [
                    f"{name}: {row}: {found[row]}, not {row.expected}"
                    for name, row in rows
                    if found[row] != row.expected
                ]
                assert not wrong, "\n".join([*wrong, *(line.text for line in cluster.agent.lines[-_LINES:])])


def _without_eperm(row: Row, answer: str | frozenset[str]) -> str | frozenset[str]:
    return REFUSED if (answer, row.expected) == (DENIED, REFUSED) else answer


def _outcomes(rows: Iterable[Row]) -> dict[Row, str | frozenset[str]]:
    clients: dict[Netns, list[Row]] = {}
    for row in rows:
        clients.setdefault(row.client, []).append(row)
    found: dict[Row, str | frozenset[str]] = {}
    for client, own in clients.items():
        create = creating_in(client)

        def answers(row: Row, create: sockets.Create = create) -> list[str]:
            return [outcome_of(each, create) for each in _dials(row)]

        with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
            for row, of_row in zip(own, threads.map(answers, own), strict=True):
                found[row] = _as_expected(row, of_row)
    return found


def _as_expected(row: Row, answers: list[str]) -> str | frozenset[str]:
    if isinstance(row.expected, str) and " " in row.expected:
        return answers[0]
    names = [answer.partition(" ")[0] for answer in answers]
    return names[0] if isinstance(row.expected, str) else frozenset(names)


def _dials(row: Row) -> list[Dial]:
    timeout = SILENCE if row.expected == SILENT else sockets.ANSWERED
    count = 1 if isinstance(row.expected, str) else OFTEN
    # IPVS would confuse connections from one port to one endpoint.
    sources = [(row.source, next(new_ports)) for _ in range(count)]
    return [Dial(row.protocol, row.address, row.port, timeout, source) for source in sources]
