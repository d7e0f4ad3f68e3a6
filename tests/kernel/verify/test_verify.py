"""`ebpfproxy verify` finds every difference in each mode, and none where there is none."""

import contextlib
import json
from collections.abc import Iterator
from random import Random
from types import ModuleType

import pytest

from ebpfproxy.config import Config
from ebpfproxy.lab import Lab
from ebpfproxy.plan.service_plan import DetectLocal
from tests.kernel.cluster import Cluster
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.kernel.verify import in_ebpf, in_iptables, in_ipvs, in_nftables
from tests.kernel.verify.node import Node

pytestmark = pytest.mark.kernel

CHANGES: dict[str, ModuleType] = {
    "ebpf": in_ebpf,
    "nftables": in_nftables,
    "iptables": in_iptables,
    "ipvs": in_ipvs,
}
_FLAGS = {
    "nftables": ("--iptables-localhost-nodeports=false",),  # the relay of loopback ends with the agent
    "iptables": ("--iptables-backend=legacy",),
    "ipvs": ("--iptables-backend=legacy",),
}
_DETECTION = ("--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth")


@pytest.fixture(scope="module", params=CHANGES)
def served(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A node with Services of all kinds, served in one mode. The agent runs."""
    skip_without_ipvs(request.param)
    with Lab("test-verify", 35) as lab, Cluster(lab, request.param) as cluster:
        cluster.start("--iptables-min-sync-period=0s", *_FLAGS.get(request.param, ()))
        cluster.service(node_port=True).to(cluster.a, cluster.b, cluster.c)
        cluster.service(sessionAffinity="ClientIP").to(cluster.c)
        cluster.service(node_port=True, externalTrafficPolicy="Local").to(cluster.a)
        cluster.service().to()
        balanced = cluster.service(type="LoadBalancer", loadBalancerSourceRanges=["10.0.0.0/8", "fd00::/8"])
        balanced.status = {"loadBalancer": {"ingress": [{"ip": "192.0.2.20"}, {"ip": "2001:db8::20"}]}}
        balanced.to(cluster.b)
        yield cluster


def config_of(cluster: Cluster) -> Config:
    return Config(
        proxy_mode=cluster.mode,
        manifests=cluster.folder,
        cgroup_root=cluster.lab.cgroup,
        bpffs_root=cluster.lab.bpffs,
        hostname_override=cluster.lab.node_name,
        detect_local_mode=DetectLocal.INTERFACE_NAME_PREFIX,
        pod_interface_name_prefix="veth",
        iptables_backend="legacy",
        iptables_localhost_nodeports=cluster.mode != "nftables",
    )


def verified(cluster: Cluster, *flags: str) -> tuple[int, str]:
    """Exit code and output of the command with the agent's flags."""
    common = (f"--manifests={cluster.folder}", f"--hostname-override={cluster.lab.node_name}", *_DETECTION)
    done = cluster.ebpfproxy("verify", *common, *_FLAGS.get(cluster.mode, ()), *flags, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_node_in_sync_has_no_differences(served: Cluster) -> None:
    code, output = verified(served)  # --proxy-mode is auto: the running agent reports its mode
    assert output.startswith(f"mode {served.mode}: no differences in "), output
    assert code == 0


def test_differences_have_one_line_each_and_exit_code_1(served: Cluster) -> None:
    """The agent does not run, and the cluster has another Service."""
    served.end()
    served.service().to(served.a)
    code, output = verified(served, f"--proxy-mode={served.mode}", "-o", "json")
    found = json.loads(output)
    assert code == 1
    assert found["mode"] == served.mode
    assert found["differences"]
    assert any("svc-6" in str(each) or "10.96.0.6" in str(each) for each in found["differences"])
    keys = [each["key"] for each in found["differences"]]
    assert len(keys) == len(set(keys))
    code, output = verified(served, f"--proxy-mode={served.mode}")
    assert code == 1
    assert len(output.splitlines()) == len(keys) + 1


def test_each_change_in_the_kernel_is_found(served: Cluster, request: pytest.FixtureRequest) -> None:
    served.end()
    changes, config = CHANGES[served.mode], config_of(served)
    count = request.config.getoption("verify_changes") or len(changes.STAY) + len(changes.PASSING)
    missed = served.node.call(lambda: missed_changes(Node(config, Random(count)), changes, count), 1800.0)
    assert missed == []


def missed_changes(node: Node, changes: ModuleType, count: int) -> list[str]:
    """Make `count` changes, one after the other; return those that were not found."""
    missed: list[str] = []
    kinds = (*changes.STAY, *changes.PASSING)
    node.restore()
    for number in range(count):
        before = node.differences()
        if before:
            missed.append(f"{number}: differences without a change: {before}")
        kind = kinds[number % len(kinds)]
        with contextlib.ExitStack() as stack:
            passing = kind in changes.PASSING
            wanted = stack.enter_context(kind(node)) if passing else kind(node)
            found = [str(each) for each in node.differences()]
            if not any(wanted in each for each in found):
                missed.append(f"{number}: {kind.__name__}: {wanted} is not in {found}")
        node.restore()
    if node.differences():
        missed.append(f"at the end: {node.differences()}")
    return missed
