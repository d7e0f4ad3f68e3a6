"""No connection fails while agents restart, modes switch, and devices, addresses and routes change."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.bench.agent_runner import AgentRunner, FaultSchedule
from ebpfproxy.bench.load import Load, Target
from ebpfproxy.lab import Lab, Pod, PodNetwork
from tests.kernel.cluster import START_PATIENCE, TCP_TARGET
from tests.kernel.zoo.base import HOST_PORTS, NODE_PORTS, PORTS, Zoo
from tests.kernel.zoo.random_changes import RandomChanges
from tests.kernel.zoo.situations import routed_guest

pytestmark = pytest.mark.kernel

MODES = ("ebpf", "nftables", "iptables")
DIRECT = "direct"
_RATE = 200.0  # connections per second of each client
_LASTING = 20  # connections of each client that last for a round


@pytest.mark.timeout(0)
def test_no_connection_fails_while_the_node_changes_at_random(pytestconfig: pytest.Config) -> None:
    """Some clients connect without a Service, and show that a node without a proxy had no failure either.

    --connects=N for longer, --faults-seed=SEED to repeat a run.
    """
    seed, wanted = pytestconfig.getoption("faults_seed"), pytestconfig.getoption("connects")
    with Lab("test-random", 79, PodNetwork.ROUTED) as lab:
        node = Zoo(lab)
        routed_guest(node)
        load = Load(lab.folder)
        for pod in (node.a, node.d):
            load.serve(pod, TCP_TARGET)
        load.serve(node.node, HOST_PORTS["self"])
        folder = lab.folder / "manifests"
        folder.mkdir()
        node.write()
        runner = AgentRunner(lab, folder, MODES, FaultSchedule())
        changes = RandomChanges(node, runner, seed)
        targets = dict(_targets(node, load))
        attempts = rounds = slow = 0
        while attempts < wanted:
            since = len(changes.done)
            reports = _round(node, load, targets, changes)
            runner.agent.await_sync(timeout=START_PATIENCE)
            runner.end()
            rounds += 1
            attempts += sum(each["attempts"] for each in reports.values())
            slow += sum(each.get("slow", 0) for each in reports.values())
            failed = {name: each["errors"] for name, each in reports.items() if each["failed"]}
            where = f"seed {seed!r}, round {rounds}: {changes.done[since:]}"
            assert not {name for name in failed if DIRECT in name}, f"direct: {failed}; {where}"
            assert not failed, where
            print(f"{rounds}: {attempts} connections, {runner}", flush=True)
    print(f"\nseed {seed!r}: {attempts} connections, {slow} slow, {len(changes.done)} changes, {runner}")


def _round(
    node: Zoo, load: Load, targets: dict[str, tuple[Pod, Path]], changes: RandomChanges
) -> dict[str, dict[str, Any]]:
    """Make each change once while all clients connect, and return their reports."""
    lasting = {f"{name} lasting": load.hold(*each, _LASTING, busy=50.0)[0] for name, each in targets.items()}
    new = {
        name: load.start_churn(pod, path, rate=_RATE, seed=len(changes.done))
        for name, (pod, path) in targets.items()
    }
    try:
        for _ in changes.all_once():
            time.sleep(changes.pause())
    finally:
        reports = {name: load.end_churn(each) for name, each in (lasting | new).items()}
    return reports


def _targets(node: Zoo, load: Load) -> Iterator[tuple[str, tuple[Pod, Path]]]:
    """The pod of each client and the file of its targets, by name."""
    for client, pod in node.clients.items():
        for kind in ("ClusterIP", "NodePort", "LoadBalancer"):
            listed = [
                (address, NODE_PORTS[service] if kind == "NodePort" else PORTS[service])
                for service in ("here", "there")
                for address in node.frontend(kind, service, client)
            ]
            yield _named(load, pod, client, kind, listed)
        # The network routes no replies to the guest.
        servers = (node.a,) if client == "guest" else (node.a, node.d)
        direct = [(each, TCP_TARGET) for server in servers for each in (server.v4, server.v6)]
        if client != "node":
            direct += [(each, HOST_PORTS["self"]) for each in node.addresses[client]]
        yield _named(load, pod, client, DIRECT, direct)


def _named(
    load: Load, pod: Pod, client: str, kind: str, targets: Sequence[Target]
) -> tuple[str, tuple[Pod, Path]]:
    return f"{client} {kind}", (pod, load.targets(f"{client}-{kind}", targets))
