"""Connects by each path of this node, in the mode that serves, and reports one result for each path."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any

from ebpfproxy.backends.interface import Inspection
from ebpfproxy.config import Config
from ebpfproxy.diagnose.canary.choice import PathKey, paths_of
from ebpfproxy.diagnose.canary.clients import Client, SocketClient, UplinkClient
from ebpfproxy.diagnose.canary.judgment import name, tried
from ebpfproxy.diagnose.canary.result import Result, State
from ebpfproxy.diagnose.cluster import Cluster, read_cluster
from ebpfproxy.diagnose.explain import host
from ebpfproxy.diagnose.explain.connection import explain
from ebpfproxy.diagnose.explain.destination import Request
from ebpfproxy.diagnose.explain.lookup import USERSPACE
from ebpfproxy.diagnose.explain.origin import THE_NODE
from ebpfproxy.diagnose.explain.result import Destination, Explanation
from ebpfproxy.diagnose.situation import Situation, situation_of_mode
from ebpfproxy.diagnose.verify import Inspectable, sync_seconds
from ebpfproxy.plan.service_plan import DeviceRole

_PODS, _DESTINATIONS, _EXPLANATIONS = 2, 3, 200
"""For each path: the most pods, and the most connections and explanations of each client."""

_Path = tuple[str, PathKey]
"""The class of the client, and what distinguishes its paths."""


def canary(
    mode: Inspectable,
    config: Config,
    named: Sequence[Request] = (),
    read: Callable[[Config], Cluster] = read_cluster,
    sleep: Callable[[float], object] = time.sleep,
) -> list[Result]:
    """Return a result for each path that exists on this node. `named`: Services to use instead.

    The cluster and the kernel change meanwhile. So if a path fails, it is tried again when the agent had time
    for a sync, and that result counts. Raises EbpfProxyError if the cluster or the kernel cannot be read, or
    if a named Service does not exist.
    """
    with contextlib.closing(mode.inspect(config)) as inspection:

        def run(only: Collection[_Path] | None = None) -> dict[_Path, Result]:
            situation = situation_of_mode(read(config), inspection, mode.name, config, host.route_to)
            return dict(_results(situation, inspection, named, only))

        found = run()
        failed = [path for path, each in found.items() if each.state is State.FAILS]
        if failed:
            sleep(sync_seconds(config, mode.name))
            again = run(failed)
            found = {path: again.get(path, each) for path, each in found.items()}
        return list(found.values())


def _results(
    situation: Situation,
    inspection: Inspection[Any, Any],
    named: Sequence[Request],
    only: Collection[_Path] | None,
) -> Iterator[tuple[_Path, Result]]:
    """Yield a result for each path, or for those of `only`."""
    for group, clients in _clients(situation):
        for key, destinations in paths_of(situation, clients[0].origin, named).items():
            if only is None or (group, key) in only:
                candidates = _candidates(situation, clients, destinations)
                result = _first_proof(candidates, inspection)
                if result is None and named:
                    result = _excluded(explain(situation, clients[0].origin, destinations[0]), clients[0])
                if result:
                    yield (group, key), result


def _candidates(
    situation: Situation, clients: Sequence[Client], destinations: Sequence[Destination]
) -> Iterator[tuple[Client, Explanation]]:
    """Yield connections that should be established, some for each client. Those of an endpoint to itself are
    the last ones."""
    hairpins = []
    for client in clients:
        explanations = (explain(situation, client.origin, each) for each in destinations[:_EXPLANATIONS])
        for explanation in islice((each for each in explanations if each.works), _DESTINATIONS):
            if any(each.used and each.address in client.origin.addresses for each in explanation.endpoints):
                hairpins.append((client, explanation))
            else:
                yield client, explanation
    yield from hairpins


def _first_proof(
    candidates: Iterator[tuple[Client, Explanation]], inspection: Inspection[Any, Any]
) -> Result | None:
    """Return the first result that proves something, else the first result. None without candidates."""
    first = None
    for client, explanation in candidates:
        result = tried(client, explanation, inspection.endpoint_of)
        if result.state is not State.UNPROVEN:
            return result
        first = first or result
    return first


def _excluded(explanation: Explanation, client: Client) -> Result | None:
    """The result for a named frontend to which this client cannot connect. None if the mode has no such
    frontend, for example at loopback."""
    to = explanation.destination
    if not to or not explanation.path or not explanation.service:
        return None
    detail = f"no connection was made: {explanation.why.meaning}"
    place = explanation.path.place
    return Result(name(client, to), to, explanation.service, place, State.UNPROVEN, detail=detail)


def _clients(situation: Situation) -> Iterator[tuple[str, Sequence[Client]]]:
    """Yield the clients of each class, in the order in which they are tried."""
    yield "node", [SocketClient(THE_NODE._replace(name="node"))]
    found = islice(host.pods_here(situation), _PODS)
    pods = [SocketClient(origin._replace(name="pod"), path) for path, origin in found]
    if pods:
        yield "pod", pods
    for plan in situation.node.devices:
        device = situation.device(plan.ifindex)
        if plan.role is DeviceRole.UPLINK and device:
            yield device.name, [UplinkClient(device, completes=situation.mode == USERSPACE)]
