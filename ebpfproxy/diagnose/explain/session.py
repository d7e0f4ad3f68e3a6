"""Explains destinations with the sources that the command line names: API server or manifests, and kernel."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from ebpfproxy.backends import firewall_checks
from ebpfproxy.backends.ebpf.inspect.client_view import AffinityRow
from ebpfproxy.backends.ebpf.inspect.saved import SavedView
from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.diagnose.cluster import Cluster, read_cluster, without_machine
from ebpfproxy.diagnose.dumped import DumpInspection
from ebpfproxy.diagnose.explain import host
from ebpfproxy.diagnose.explain.connection import explain
from ebpfproxy.diagnose.explain.destination import Request, Target, parse, targets
from ebpfproxy.diagnose.explain.facts import with_affinity, with_facts, with_firewall
from ebpfproxy.diagnose.explain.from_tables import situation_of
from ebpfproxy.diagnose.explain.kernel_facts import KernelFacts
from ebpfproxy.diagnose.explain.origin import ANY_POD, EBPF, Origin
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import Explanation, Step, Verdict
from ebpfproxy.diagnose.mode_in_use import mode_in_use
from ebpfproxy.diagnose.situation import Situation, no_routes, plan_situation, situation_of_mode
from ebpfproxy.diagnose.verify import sync_seconds
from ebpfproxy.model.balancing import Forwarding
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.reason import AnyReason

Compare = Callable[[Explanation, Origin], Explanation]


class Sources(NamedTuple):
    """What the command line selects.

    - `node`, `zone`: assumed ones, None for those of this machine. With any of them, the kernel is not read.
    - `kernel`: whether this machine's kernel is read: its addresses, devices, routes and Service tables.
    - `dump`: a saved dump of mode ebpf. With --manifests it is compared instead of the maps in the kernel;
      without, it is the only source.
    """

    node: str | None = None
    zone: str | None = None
    kernel: bool = True
    dump: SavedView | None = None


class Answer(NamedTuple):
    """The explanations of all destinations of a request, and the client."""

    origin: Origin
    explanations: tuple[Explanation, ...]

    @property
    def works(self) -> bool:
        """Whether each destination works and the kernel agrees with the plan. False without destinations."""
        return bool(self.explanations) and all(
            each.works and not each.disagreements for each in self.explanations
        )


class _Knowledge(NamedTuple):
    """What was read at one time. `compare` adds facts to an explanation; None if there are none."""

    situation: Situation
    compare: Compare | None


class Session:
    """Reads the cluster and the kernel, and explains any number of requests. A context manager.

    Raises EbpfProxyError if the cluster, the mode or the kernel cannot be read.
    """

    def __init__(self, config: Config, sources: Sources) -> None:
        dumped = sources.dump.header.node if sources.dump else ""
        name = sources.node or config.hostname_override or dumped
        self._config = dataclasses.replace(config, hostname_override=name)
        self._sources = sources
        self._is_live = sources.kernel and not sources.node and sources.dump is None
        self._opened = contextlib.ExitStack()
        self._known = self._read()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def situation(self) -> Situation:
        """The plans, as of the last reading."""
        return self._known.situation

    def _read(self) -> _Knowledge:
        self._opened.close()
        if self._is_live:
            return self._of_machine()
        dump = self._sources.dump
        if dump is None:
            return _Knowledge(self._plan(host.mode_without_kernel(self._config)), None)
        affinities = functools.cache(dump.affinity)
        if self._config.manifests is None:
            situation = situation_of(dump, dump.header.node)
            return _Knowledge(
                situation, lambda each, origin: with_affinity(each, situation, origin, affinities)
            )
        situation = self._plan(host.mode_without_kernel(self._config))
        facts = KernelFacts(DumpInspection(dump, self._config), situation)
        return _Knowledge(situation, functools.partial(_with_maps, situation, facts, affinities))

    def _of_machine(self) -> _Knowledge:
        mode = mode_in_use(self._config)
        if self._sources.zone is not None:
            return _Knowledge(self._plan(mode.name), None)
        with contextlib.closing(mode.inspect(self._config)) as inspection:
            cluster = read_cluster(self._config)
            situation = situation_of_mode(cluster, inspection, mode.name, self._config, host.route_to)
            facts = KernelFacts(inspection, situation)
        dropping = functools.cache(lambda: firewall_checks.dropping(self._config, mode.name))
        with_maps: Compare | None = None
        if mode.name == EBPF:
            view = self._opened.enter_context(contextlib.closing(View(self._config.bpffs_root)))
            with_maps = functools.partial(_with_maps, situation, facts, functools.cache(view.affinity))

        def compare(each: Explanation, origin: Origin) -> Explanation:
            seen = with_firewall(each, origin, situation, dropping)
            return with_maps(seen, origin) if with_maps else with_facts(seen, facts.differences(each, origin))

        return _Knowledge(situation, compare)

    def _plan(self, mode: str) -> Situation:
        """Plan without the state of the mode in the kernel."""
        config, zone = self._config, self._sources.zone
        cluster = read_cluster(config)
        if not self._is_live:
            cluster = without_machine(cluster)
        if zone is not None:
            cluster = _with_zone(cluster, config.node_name, zone)
        return plan_situation(
            cluster,
            plan_context(config, mode),
            mode,
            scheduler=config.ipvs_scheduler,
            routes=host.route_to if self._is_live else no_routes,
            forwarding=Forwarding(config.ipvs_forwarding),
        )

    def answer(self, destination: str, client: str = "") -> Answer:
        """Explain a destination for a client; the default is any pod of this node.

        The cluster and the kernel change meanwhile. So after a difference, both are read again when the agent
        had time for a sync, and only that result counts.

        Raises ConfigError if one of the texts cannot be read, NotFound if there is no such Service.
        """
        found = self._answer(destination, client)
        if self._is_live and any(each.disagreements for each in found.explanations):
            time.sleep(sync_seconds(self._config, self.situation.mode))
            self._known = self._read()
            found = self._answer(destination, client)
        return found

    def _answer(self, destination: str, client: str) -> Answer:
        origin = host.origin_of(client, self.situation, self._is_live) if client else ANY_POD
        request = parse(destination)
        found = targets(request, self.situation)
        if not found:
            return Answer(origin, (_unserved(request, self.situation),))
        return Answer(origin, tuple(self._explained(origin, found)))

    def _explained(self, origin: Origin, found: list[Target]) -> Iterator[Explanation]:
        for destination, asked in found:
            explanation = self._with_objects(explain(self.situation, origin, destination))
            if self._known.compare:
                explanation = self._known.compare(explanation, origin)
            if asked and explanation.service and explanation.service != str(asked):
                text = f"{destination} belongs to {explanation.service}, not to {asked}"
                steps = (Step(Reason.LOST_CLAIM, text), *explanation.steps)
                explanation = dataclasses.replace(explanation, steps=steps, is_other_service=True)
            yield explanation

    def _with_objects(self, explanation: Explanation) -> Explanation:
        """Add the steps about objects that are missing, or that cannot be served."""
        first: list[Step] = []
        if self.situation.state.node is None and not self.situation.is_from_tables:
            node = self.situation.context.node_name
            first.append(Step(Reason.NO_NODE_OBJECT, f"{node}: {Reason.NO_NODE_OBJECT.meaning}"))
        if explanation.served:
            name = explanation.served.plan.name
            complaints = self.situation.complaints_about(NamespacedName(name.namespace, name.name))
            if complaints:
                first.append(Step(Reason.REJECTED_PART, Reason.REJECTED_PART.meaning, complaints))
        return dataclasses.replace(explanation, steps=(*first, *explanation.steps))


def _with_maps(
    situation: Situation,
    facts: KernelFacts,
    affinities: Callable[[], Sequence[AffinityRow]],
    each: Explanation,
    origin: Origin,
) -> Explanation:
    """Add what the maps of mode ebpf have. The programs answer echo requests without them."""
    if each.destination is None or each.destination.is_echo:
        return each
    known = with_affinity(each, situation, origin, affinities)
    return with_facts(known, facts.differences(each, origin))


def _with_zone(cluster: Cluster, name: str, zone: str) -> Cluster:
    node = dataclasses.replace(cluster.state.node or Node(name), zone=zone)
    return cluster._replace(state=dataclasses.replace(cluster.state, node=node))


def _unserved(request: Request, situation: Situation) -> Explanation:
    """Explain a Service that no proxy serves, or that has no such port."""
    assert request.service
    details: tuple[str, ...] = ()
    why: AnyReason | None = situation.unserved.get(request.service)
    if why is None and request.service in situation.requested:
        why = Reason.NO_PORT
    elif why is None:
        why, details = Reason.INVALID_OBJECT, situation.complaints_about(request.service)
    steps = (
        Step(why, f"{request.service}: {why.meaning}", details),
        Step(Reason.NO_SERVICE, Reason.NO_SERVICE.meaning),
    )
    return Explanation(None, str(request.service), Verdict.NO_SERVICE, why, steps)
