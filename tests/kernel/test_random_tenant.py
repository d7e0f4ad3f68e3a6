"""A tenant writes random Services. Those of another namespace keep their entries, and their changes wait for
no change of the tenant."""

import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from ebpfproxy.lab import manifests
from ebpfproxy.lab.manifests import Object
from ebpfproxy.linux.netns import netns
from tests.kernel.clients import TCP, Dial, outcome_of
from tests.kernel.cluster import PATIENCE, TCP_TARGET, Cluster
from tests.support.apiserver import ApiServer
from tests.support.tenant import NAMESPACE, Tenant

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]

LONG = 10_000
"""Changes of the tenant from which on the time of other changes is checked."""
QUIET = 5
"""Services of the other namespace."""
EVERY = 20
"""Changes of the tenant between two changes of the other namespace."""
ALLOWED = 0.1
"""Seconds by which the tenant may delay a change of another namespace."""


class Quiet:
    """The Services of the other namespace. Each one has one endpoint, the pod a or b."""

    def __init__(self, cluster: Cluster, server: ApiServer) -> None:
        self.cluster = cluster
        self.server = server
        self._turns = itertools.count()

    def addresses(self, number: int) -> list[str]:
        return [f"10.96.200.{number}", f"fd00:10:96::200:{number}"]

    def all_addresses(self) -> list[str]:
        return [address for number in range(1, QUIET + 1) for address in self.addresses(number)]

    def put(self, number: int, pod: str) -> None:
        name, target = f"quiet-{number}", self.cluster.lab.pods[pod]
        objects: list[Object] = [
            manifests.service(name, self.addresses(number), [manifests.port(80)], namespace="quiet")
        ]
        for family, address in (("IPv4", target.v4), ("IPv6", target.v6)):
            entry = manifests.endpoint(address, node=self.cluster.lab.node_name)
            ports = [manifests.port(TCP_TARGET)]
            objects.append(
                manifests.endpoint_slice(f"{name}-{family.lower()}", name, [entry], ports, namespace="quiet")
            )
        for each in objects:
            self.server.put(each)

    def answers(self, number: int) -> set[str]:
        """The pods that answer at both addresses."""
        with netns.entered(self.cluster.node.netns):
            found = [outcome_of(Dial(TCP, address, 80)) for address in self.addresses(number)]
        return {each.partition(" ")[0] for each in found}

    def dropped(self) -> int:
        """How many packets mode ebpf has dropped because the Service had no endpoint."""
        found = re.search(r'reason="packet_dropped"} (\S+)', self.cluster.http_get("metrics"))
        return int(float(found[1])) if found else 0

    def change(self) -> float:
        """Give the next Service the other endpoint; return the seconds until it answers."""
        turn = next(self._turns)
        number, pod = turn % QUIET + 1, "ab"[turn // QUIET % 2]
        began = time.monotonic()
        self.put(number, pod)
        while self.answers(number) != {pod}:
            assert time.monotonic() < began + PATIENCE, f"quiet-{number} has the endpoint {pod}"
            time.sleep(0.002)  # `eventually` pauses longer than what is measured here
        return time.monotonic() - began


@pytest.fixture(params=["ebpf", "nftables"])
def quiet(request: pytest.FixtureRequest, restartable: Cluster, tmp_path: Path) -> Iterator[Quiet]:
    """The agent follows an API server on the node's 127.0.0.1."""
    restartable.mode = request.param
    server = ApiServer()
    server.put(manifests.node(restartable.lab.node_name, [restartable.node.v4, restartable.node.v6]))
    with netns.entered(restartable.node.netns):
        server.start()
    try:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        restartable.start("--manifests=", f"--kubeconfig={tmp_path / 'kubeconfig'}")
        yield Quiet(restartable, server)
    finally:
        restartable.end()
        server.stop()


@pytest.mark.backends("ebpf", "nftables")
def test_a_random_tenant_neither_changes_nor_delays_others(quiet: Quiet, pytestconfig: pytest.Config) -> None:
    count: int = pytestconfig.getoption("tenant")
    lab = quiet.cluster.lab
    pods = [address for pod in (quiet.cluster.p, quiet.cluster.q) for address in (pod.v4, pod.v6)]
    wanted = [*quiet.all_addresses(), lab.pods["a"].v4, lab.pods["b"].v6, quiet.cluster.node.v4]
    tenant = Tenant(7, lab.node_name, pods, wanted)
    alone = [quiet.change() for _ in range(6 * QUIET)][2 * QUIET :]  # not the first ones to each pod
    present: dict[str, list[Object]] = {}
    delays = []
    for number, (name, objects) in enumerate(tenant.changes(count)):
        for each in present.pop(name, []):
            if not objects or each not in objects:
                quiet.server.delete(each["kind"], NAMESPACE, each["metadata"]["name"])
        for each in objects:
            quiet.server.put(each)
        present[name] = objects
        if not number % EVERY:
            delays.append(quiet.change())
    for what, seconds in (("alone", alone), ("beside the tenant", delays)):
        longest = f"median {median(seconds):.3f} s, longest {max(seconds):.3f} s"
        print(f"{what}: {longest} of {len(seconds)}")
    for number in range(1, QUIET + 1):
        assert len(quiet.answers(number)) == 1
        assert quiet.answers(number) <= {"a", "b"}
    assert not quiet.dropped()
    if count >= LONG:
        assert max(delays) <= max(alone) + ALLOWED
