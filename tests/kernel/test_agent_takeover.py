"""An agent takes over a node from kube-proxy without any failed connection."""

import contextlib
import functools
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ebpfproxy.agent.firewall_report import FOUND
from ebpfproxy.agent.mode_cleanup import ALONE, REMOVED
from ebpfproxy.bench.load import Load
from ebpfproxy.lab import Lab
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.xtables.iptables import ToolBackend
from ebpfproxy.model.address import Family
from tests.kernel.clients import SILENT, TCP, outcome
from tests.kernel.cluster import START_PATIENCE, Cluster, eventually
from tests.kernel.download import Download, offer
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.support import kube_proxy

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(1200)]

STEMS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
TABLES = ("filter", "nat", "mangle")
CONNECTIONS_A_SECOND = 50.0  # of each client; the agent needs most of a slow VM's CPU time
CONNECTING = 0.5  # seconds, at least: a takeover takes 0.2 s on a fast machine
CLEANED_UP_WITHIN = 240.0  # seconds: twice the time for which conntrack keeps a closed connection


class Frontend(NamedTuple):
    """A Service of kube-proxy's captured rule sets."""

    v4: str
    v6: str
    port: int
    node_port: int


WEB = Frontend("10.96.60.4", "fd00:10:96::6004", 80, 31104)
"""default/node-port; endpoints: port 8080 of a and b."""
FILES, FILES_TARGET = Frontend("10.96.60.6", "fd00:10:96::6006", 443, 31107), 8443
"""default/ranges; endpoint: FILES_TARGET of b."""
DELETED = re.compile(rf"default/(?:{'|'.join(kube_proxy.DELETED)})[:/]")


class Node:
    """A node with pods for the endpoints in kube-proxy's captured rules. No agent runs yet."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._instead = kube_proxy.replacements(cluster.lab, cluster.a, cluster.b, cluster.c)
        cluster.write("captured", *kube_proxy.objects(self._instead))
        offer(cluster.b, FILES_TARGET)
        # The last nat chain is kept while conntrack has entries of ended connections.
        for state in ("time_wait", "close"):
            name = f"net/netfilter/nf_conntrack_tcp_timeout_{state}"
            self.cluster.node.call(functools.partial(sysctl.ensure, name, "1"))

    def run(self, command: str, text: str = "") -> str:
        return str(self.cluster.node.run(command.split(), stdin=text).stdout)

    def have_kube_proxy(self, mechanism: str) -> None:
        """Load rules captured from kube-proxy; for mode ipvs, the state that the agent writes."""
        if mechanism == "ipvs":
            self.cluster.start("--proxy-mode=ipvs", "--ipvs-tcpfin-timeout=1s")
            self.cluster.end()
        elif mechanism == "nftables":
            self.run("nft -f -", kube_proxy.nftables_text(self._instead))
        else:
            for family, stem in STEMS.items():
                text = kube_proxy.iptables_text(family, self._instead)
                self.run(f"{stem}-{mechanism}-restore -w --noflush", text)

    def rules(self) -> str:
        """The rules of both iptables backends and both families."""
        return "".join(
            self.run(f"{stem}-{tool_backend}-save") for stem in STEMS.values() for tool_backend in ToolBackend
        )

    def chains(self) -> set[str]:
        """The names of all chains of kube-proxy and the kubelet."""
        return set(re.findall(r"^:(KUBE-\S+)", self.rules(), re.MULTILINE))

    def ruleset(self) -> str:
        """The nftables tables of kube-proxy, without those that iptables shows."""
        tables = re.findall(
            r"^table \w+ kube-proxy \{$.*?^\}$", self.run("nft list ruleset"), re.MULTILINE | re.DOTALL
        )
        return "\n".join(tables)

    def reset(self) -> None:
        """End the agent; remove all state of the agent and of kube-proxy."""
        self.cluster.end()
        self.cleanup()
        self.run("nft flush ruleset")
        for stem in STEMS.values():
            for table in TABLES:
                self.run(f"{stem}-legacy -t {table} -F")
                self.run(f"{stem}-legacy -t {table} -X")
        self.cluster.forget_connections()

    def cleanup(self) -> str:
        return self.cluster.ebpfproxy("cleanup").stdout


@pytest.fixture(scope="module")
def _node() -> Iterator[Node]:
    with Lab("test-takeover", 4) as lab, Cluster(lab) as cluster:
        yield Node(cluster)


@pytest.fixture
def node(_node: Node) -> Iterator[Node]:
    try:
        yield _node
    finally:
        _node.reset()


@contextlib.contextmanager
def clients(node: Node, load: Load) -> Iterator[None]:
    """Within the block, clients open and close connections to all addresses of the Service; none may fail."""
    host = node.cluster.node
    inside = load.targets("inside", [(WEB.v4, WEB.port), (WEB.v6, WEB.port)], [(host.v4, WEB.node_port)])
    outside = load.targets("outside", [(address, WEB.node_port) for address in (host.v4, host.v6)])
    targets_of = {node.cluster.p: inside, node.cluster.node: inside, node.cluster.lab.outside: outside}
    running = [load.start_churn(client, to, rate=CONNECTIONS_A_SECOND) for client, to in targets_of.items()]
    began = time.monotonic()
    try:
        yield
        time.sleep(max(0.0, CONNECTING - (time.monotonic() - began)))  # the tested condition
    finally:
        reports = [load.end_churn(each) for each in running]
    for client, report in zip(targets_of, reports, strict=True):
        assert (report["failed"], report["errors"]) == (0, {}), client.name
        assert report["attempts"] > CONNECTIONS_A_SECOND / 4, client.name


@contextlib.contextmanager
def downloads(node: Node) -> Iterator[None]:
    """Downloads of a pod, the node and an external client start before the block and finish after it."""
    pod, host, outside = node.cluster.p, node.cluster.node, node.cluster.lab.outside
    targets = [(pod, address, FILES.port) for address in (FILES.v4, FILES.v6)]
    targets += [(host, address, FILES.port) for address in (FILES.v4, FILES.v6)]
    targets += [(outside, address, FILES.node_port) for address in (host.v4, host.v6)]
    begun = {dial: Download(*dial) for dial in targets}
    yield
    before = {dial: each.received for dial, each in begun.items()}
    for (client, address, port), each in begun.items():
        has_progress = functools.partial(lambda of, at: of.received > at, each, before[client, address, port])
        eventually(has_progress, f"{client.name} receives more from {address} port {port}")
    for each in begun.values():
        each.finish()


def serves_alone(node: Node, mode: str) -> bool:
    """No rule of the previous Services is left, and new connections meet only this mode's rules."""
    rules, ruleset = node.rules(), node.ruleset()
    own = {
        "nftables": "@service-ips" in ruleset,
        "iptables": "-j KUBE-SVC-" in rules,
        # KUBE-IPVS-FILTER also matches this set, and is kept as long as IPVS has connections.
        "ipvs": bool(re.search("^-A KUBE-SERVICES .*--match-set KUBE-CLUSTER-IP ", rules, re.MULTILINE)),
    }
    return not DELETED.search(rules + ruleset) and not any(
        of != mode and present for of, present in own.items()
    )


@pytest.mark.parametrize("mode", ["ebpf", "nftables", "iptables", "ipvs"])
@pytest.mark.parametrize("mechanism", [*ToolBackend, "nftables", "ipvs"])
def test_takeover_from_kube_proxy_fails_no_connection_and_removes_its_rules(
    node: Node, load: Load, mechanism: str, mode: str
) -> None:
    for each in (mode, mechanism):
        skip_without_ipvs(each)
    node.have_kube_proxy(mechanism)
    kubelets = node.chains() & kube_proxy.KUBELETS - {"KUBE-FIREWALL"}
    with downloads(node), clients(node, load):
        agent = node.cluster.launch(f"--proxy-mode={mode}", "--iptables-min-sync-period=0s")
        agent.await_sync(timeout=START_PATIENCE)
        eventually(
            lambda: serves_alone(node, mode), "kube-proxy's rules no longer have an effect", CLEANED_UP_WITHIN
        )
    agent.await_line(lambda line: ALONE in line.text, timeout=CLEANED_UP_WITHIN)
    assert serves_alone(node, mode)
    assert mode == "nftables" or not node.ruleset()
    assert mode in ("iptables", "ipvs") or node.chains() <= kube_proxy.KUBELETS
    assert outcome(node.cluster.p, TCP, WEB.v6, WEB.port) in ("a", "b")
    agent.stop()
    node.cleanup()
    assert node.chains() - {"KUBE-FIREWALL"} == kubelets
    assert not node.ruleset()
    assert outcome(node.cluster.p, TCP, WEB.v4, WEB.port, 0.3) not in ("a", "b")


@pytest.mark.same_for("tool_backend")
@pytest.mark.parametrize("tool_backend", ToolBackend)
def test_open_connections_continue_although_the_policy_of_forward_is_drop(
    node: Node, tool_backend: ToolBackend
) -> None:
    """KUBE-FORWARD accepted their packets. Docker and ufw set that policy."""
    node.have_kube_proxy(tool_backend)
    policies = [f"{stem}-{tool_backend} -P FORWARD {{}}" for stem in STEMS.values()]
    try:
        for policy in policies:
            node.run(policy.format("DROP"))
        for stem in STEMS.values():
            node.run(f"{stem}-{tool_backend} -A FORWARD ! -i eth0 -j ACCEPT")
        with downloads(node):
            agent = node.cluster.launch("--proxy-mode=ebpf")
            agent.await_line(lambda line: REMOVED in line.text, timeout=START_PATIENCE)
        found = agent.await_line(lambda line: FOUND in line.text, timeout=START_PATIENCE)
        assert f"iptables-{tool_backend} and ip6tables-{tool_backend}: FORWARD drops" in found.text
        agent.await_line(lambda line: ALONE in line.text, timeout=CLEANED_UP_WITHIN)
        assert "KUBE-FORWARD" not in node.rules()
        frontend = node.cluster.lab.outside, TCP, node.cluster.node.v4, WEB.node_port
        assert outcome(*frontend) == SILENT
        node.run(f"iptables-{tool_backend} -I FORWARD -d {node.cluster.lab.addresses.pods(0).v4} -j ACCEPT")
        assert outcome(*frontend) in ("a", "b"), "the remedy"
    finally:
        for policy in policies:
            node.run(policy.format("ACCEPT"))
