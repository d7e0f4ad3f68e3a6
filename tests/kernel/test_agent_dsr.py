"""Direct server return by agents that read Nodes, Services and EndpointSlices from one API server."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.agent.announcer import ANNOUNCED, NOT_ANNOUNCED, WITHDRAWN
from ebpfproxy.agent.ignored_balancing import IGNORED
from ebpfproxy.agent.mode_switch import SWITCHED
from ebpfproxy.lab import Agent, Lab, Node, Pod, PodNetwork, manifests
from ebpfproxy.lab.agent import LogLine
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, outcome
from tests.kernel.cluster import EACH_SYNC, START_PATIENCE, eventually
from tests.kernel.dsr_nodes import PORTS, TARGETS, VIP, DsrNodes, has_geneve
from tests.support.apiserver import ApiServer, Request

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600)]

ANNOTATION = "ebpfproxy/dsr-port"
PORT = "6083"
DSR = {"ebpfproxy/ebpf-forwarding": "dsr"}


class Agents:
    """Three nodes, an API server that each reaches at 127.0.0.1, and the agents that were started."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.network = DsrNodes(lab)
        self.a, self.b, self.c = lab.nodes
        self.x = lab.outside
        self.server = ApiServer()
        self.kubeconfig = folder / "kubeconfig"
        self._running: dict[str, Agent] = {}
        for node in lab.nodes:
            with netns.entered(node.host.netns):
                self.server.start()
        self.server.write_kubeconfig(self.kubeconfig)

    def reset(self) -> None:
        """End all agents; put the Nodes again, without annotations."""
        self.end()
        self.server.fail_nothing()
        for node in self.network.nodes:
            self.server.put(manifests.node(node.name, [node.host.v4, node.host.v6]))
        self.network.dial(self.a)

    def end(self) -> None:
        for each in self._running.values():
            each.kill()
        self._running.clear()

    def flags(self, node: Node) -> list[str]:
        """Those of commands that read the same state as the agent of this node."""
        return [
            f"--kubeconfig={self.kubeconfig}",
            f"--cgroup-root={node.cgroup}",
            f"--bpffs-root={node.bpffs}",
            f"--hostname-override={node.name}",
        ]

    def start(self, node: Node, *flags: str) -> Agent:
        """Start the agent of a node, or again with other flags, and wait for its first sync."""
        if node.name in self._running:
            self._running[node.name].kill()
        mode = (
            ()
            if any(each.startswith(("--config", "--proxy-mode")) for each in flags)
            else ("--proxy-mode=ebpf",)
        )
        more = "--manifests=", f"--kubeconfig={self.kubeconfig}", *mode, EACH_SYNC, *flags
        agent = node.agent(Path(), *more, wait=START_PATIENCE)
        self._running[node.name] = agent
        return agent

    def start_all(self, *flags: str) -> None:
        """Start all agents with direct server return, and wait until each has announced it."""
        for node in self.network.nodes:
            agent = self.start(node, f"--ebpf-dsr-port={PORT}", *flags)
            await_message(agent, ANNOUNCED)

    def serve(self, pod: Pod, annotations: dict[str, str] | None = None) -> None:
        """The only endpoint of the Service is this pod."""
        ports = [
            manifests.port(number, name=each.name.lower(), protocol=each.name, target=TARGETS[each])
            for each, number in PORTS.items()
        ]
        node = next(each for each in self.network.nodes if pod in each.pods.values())
        web: dict[str, Any] = manifests.service(
            "web", ["10.96.0.10", "fd00:96::10"], ports, annotations=annotations, type="LoadBalancer"
        )
        web["status"] = {"loadBalancer": {"ingress": [{"ip": each} for each in VIP.values()]}}
        targets = [
            manifests.port(TARGETS[each], name=each.name.lower(), protocol=each.name) for each in PORTS
        ]
        self.server.put(web)
        for name in VIP:
            there = manifests.endpoint(getattr(pod, name), node=node.name)
            self.server.put(manifests.endpoint_slice(f"web-{name}", "web", [there], targets))

    def answer(self, family: str = "v4", protocol: Protocol = TCP) -> str:
        return outcome(self.x, protocol, VIP[family], PORTS[protocol], 1.0)

    def sees(self, pod: Pod, client: Pod | None, family: str = "v4", protocol: Protocol = TCP) -> bool:
        """Whether the pod answers and sees this client; None: any other than the one outside."""
        name, _, seen = self.answer(family, protocol).partition(" ")
        expected = getattr(client or self.x, family)
        return name == pod.name and (seen == expected) is (client is not None)

    def await_seen(self, pod: Pod, client: Pod | None, family: str = "v4", protocol: Protocol = TCP) -> None:
        seen = client.name if client else "the dialed node"
        try:
            eventually(
                lambda: self.sees(pod, client, family, protocol),
                f"{pod.name} answers {family} {protocol.name} and sees {seen}",
            )
        except AssertionError as failure:
            failure.add_note(f"answer: {self.answer(family, protocol)}")
            for node in self.network.nodes:
                failure.add_note(f"{node.name}: {self.network.counters(node)}")
            raise


def await_message(agent: Agent, message: str) -> LogLine:
    """Wait as long as for a start: in a slow VM, a switch of the mode takes a minute."""
    return agent.await_line(lambda line: message in line.text, timeout=START_PATIENCE)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    if not has_geneve():
        pytest.skip("this kernel has no Geneve")
    with Lab("test-agent-dsr", 83, PodNetwork.ROUTED, nodes=3) as lab:
        agents = Agents(lab, tmp_path_factory.mktemp("dsr"))
        try:
            yield agents
        finally:
            agents.end()
            agents.server.stop()


@pytest.fixture
def agents(nodes: Agents) -> Agents:
    nodes.reset()
    return nodes


def test_the_endpoint_sees_the_client_and_replies_directly(agents: Agents) -> None:
    pod = agents.network.pods[1]
    agents.serve(pod, DSR)
    agents.start_all()
    for node in agents.network.nodes:
        assert agents.server.annotations(node.name) == {ANNOTATION: PORT}
    for family in VIP:
        for protocol in PORTS:
            agents.await_seen(pod, agents.x, family, protocol)
    assert agents.network.counters(agents.b)["tunnel_received"] > 0
    agents.network.dial(agents.c)
    agents.await_seen(pod, agents.x)


def test_only_annotated_services_are_tunneled(agents: Agents) -> None:
    pod = agents.network.pods[1]
    agents.serve(pod)
    agents.start_all()
    agents.await_seen(pod, None)
    agents.serve(pod, DSR)
    agents.await_seen(pod, agents.x)
    agents.serve(pod, {"ebpfproxy/ebpf-forwarding": "snat"})
    agents.await_seen(pod, None)


def test_a_rollout_of_the_flag_interrupts_nothing(agents: Agents) -> None:
    """The dialed node has --ebpf-forwarding=dsr, the endpoint's node only accepts tunneled packets."""
    pod = agents.network.pods[1]
    agents.serve(pod)
    agents.start_all()
    agents.await_seen(pod, None)
    agents.start(agents.a, f"--ebpf-dsr-port={PORT}", "--ebpf-forwarding=dsr")
    agents.await_seen(pod, agents.x)


def test_a_node_that_turns_it_off_gets_translated_packets(agents: Agents) -> None:
    pod = agents.network.pods[1]
    agents.serve(pod, DSR)
    agents.start_all()
    agents.await_seen(pod, agents.x)
    agent = agents.start(agents.b)
    await_message(agent, WITHDRAWN)
    assert agents.server.annotations(agents.b.name) == {}
    agents.await_seen(pod, None)
    ignored = await_message(agent, IGNORED)
    assert ignored.values["ignored"] == "ebpf-forwarding dsr"


def test_a_switch_to_another_mode_withdraws_the_announcement(agents: Agents, tmp_path: Path) -> None:
    pod = agents.network.pods[1]
    agents.serve(pod, DSR)
    agents.start_all()
    config = tmp_path / "config.yaml"
    header = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    rest = f"clientConnection: {{kubeconfig: {agents.kubeconfig}}}\nclusterCIDR: 10.0.0.0/8\n"
    config.write_text(f"{header}mode: ebpf\n{rest}")
    agent = agents.start(agents.b, f"--config={config}", f"--ebpf-dsr-port={PORT}")
    agents.await_seen(pod, agents.x)
    config.write_text(f"{header}mode: nftables\n{rest}")
    await_message(agent, SWITCHED)
    await_message(agent, WITHDRAWN)
    agents.await_seen(pod, None)
    config.write_text(f"{header}mode: ebpf\n{rest}")
    eventually(lambda: agents.server.annotations(agents.b.name) == {ANNOTATION: PORT}, "the announcement")
    agents.await_seen(pod, agents.x)


def test_without_permission_the_services_are_translated(agents: Agents) -> None:
    def is_patch(request: Request) -> bool:
        return request.method == "PATCH"

    pod = agents.network.pods[1]
    agents.serve(pod, DSR)
    agents.server.fail(1_000_000, 403, match=is_patch)
    for node in (agents.a, agents.b):
        agent = agents.start(node, f"--ebpf-dsr-port={PORT}")
        line = await_message(agent, NOT_ANNOUNCED)
        assert "verb patch on nodes" in line.values["hint"]
    agents.await_seen(pod, None)


def test_verify_and_explain_consider_the_tunnels(agents: Agents) -> None:
    pod = agents.network.pods[1]
    agents.serve(pod, DSR)
    agents.start_all()
    agents.await_seen(pod, agents.x)
    flags = "--proxy-mode=ebpf", f"--ebpf-dsr-port={PORT}"
    for node in (agents.a, agents.b):
        done = run(agents, node, "verify", *flags)
        assert done.returncode == 0, done.stdout + done.stderr
    frontend, client = f"{VIP['v4']}:{PORTS[TCP]}", f"--from={agents.x.v4}"
    done = run(agents, agents.a, "explain", frontend, client, "--output=json", *flags)
    assert '"DirectReturn"' in done.stdout, done.stdout + done.stderr
    assert f"{pod.v4}:{TARGETS[TCP]}: by {agents.b.host.v4}" in done.stdout


def test_cleanup_withdraws_the_announcement(agents: Agents) -> None:
    await_message(agents.start(agents.b, f"--ebpf-dsr-port={PORT}"), ANNOUNCED)
    agents.end()
    done = run(agents, agents.b, "cleanup", "--dry-run")
    assert f"would remove the annotation {ANNOTATION} of node {agents.b.name}" in done.stdout
    assert agents.server.annotations(agents.b.name) == {ANNOTATION: PORT}
    done = run(agents, agents.b, "cleanup")
    assert done.returncode == 0, done.stderr
    assert f"removed the annotation {ANNOTATION} of node {agents.b.name}" in done.stdout
    assert agents.server.annotations(agents.b.name) == {}


def run(agents: Agents, node: Node, *command: str) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-m", "ebpfproxy", *command, *agents.flags(node)]
    return node.host.run(program, check=False, timeout=120)
