"""A node served by the iptables backend with one tool backend, in an empty namespace or in a lab."""

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.entries import Entry, Key
from ebpfproxy.backends.iptables.rules import IptablesSettings
from ebpfproxy.errors import KernelError
from ebpfproxy.lab import Lab
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables.iptables import ToolBackend
from ebpfproxy.model.address import parse_network
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.service import Service
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import DetectLocal, NodePlan, PlanContext, ServicePortPlan
from tests.support.build import HERE, endpoint, networks, slice_of

TOOL_BACKENDS = tuple(ToolBackend)
TARGET = 8080
"""The port of all endpoints."""


class Testbed:
    """The backend on a node, in whose network namespace the calling thread is."""

    __test__ = False  # pytest collects classes by their names

    def __init__(self, tool_backend: ToolBackend, node: NodePlan, context: PlanContext) -> None:
        self.tool_backend = tool_backend
        self.node = node
        self.context = context
        self.plane = self.another_run()

    def another_run(self) -> IptablesBackend:
        """A new, open backend, as after a restart of the agent."""
        plane = IptablesBackend(IptablesSettings(), self.tool_backend)
        plane.open()
        return plane

    def plans(self, service: Service, *slices: EndpointSlice) -> tuple[ServicePortPlan, ...]:
        return plan_service(service, slices, None, self.context)

    def wanted(self, *plans: Sequence[ServicePortPlan]) -> dict[Key, Entry]:
        return self.plane.render([plan for each in plans for plan in each], self.node)

    def bring(self, wanted: Mapping[Key, Entry]) -> Mapping[Key, KernelError]:
        """Apply the desired state to the kernel, based on what is read from it; the rejected entries."""
        return self.plane.apply(diff(self.plane.read(), wanted))

    def iptables(self, command: str) -> str:
        """Run a command of iptables(8), as another program would; its output."""
        return self._run(f"iptables-{self.tool_backend} -w {command}")

    def restore(self, text: str) -> None:
        self._run(f"iptables-{self.tool_backend}-restore -w --noflush", text)

    def rules(self, table: str, chain: str) -> list[str]:
        """The rules of a chain, without "-A chain " at the beginning."""
        lines = self.iptables(f"-t {table} -S {chain}").splitlines()
        return [line.split(" ", 2)[2] for line in lines if line.startswith("-A")]

    def _run(self, command: str, text: str = "") -> str:
        done = subprocess.run(
            ["sh", "-c", command], input=text, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout


@contextlib.contextmanager
def empty_node(tool_backend: ToolBackend) -> Iterator[Testbed]:
    """Within the block, the calling thread is in a new, empty network namespace."""
    local = networks(("127.0.0.0/8", "192.0.2.10/32", "::1/128", "2001:db8::10/128"))
    context = _context("10.1.0.0/16", "fd01::/64")
    with netns.throw_away():
        testbed = Testbed(tool_backend, NodePlan(frozenset(local), frozenset(local)), context)
        try:
            yield testbed
        finally:
            testbed.plane.close()


@contextlib.contextmanager
def on_node(lab: Lab, tool_backend: ToolBackend) -> Iterator[Testbed]:
    """Within the block, the calling thread is on the lab's node. All rules are removed afterwards."""
    v4, v6 = lab.addresses.pods(0)
    local = frozenset(networks(("127.0.0.0/8", f"{lab.node.v4}/32", "::1/128", f"{lab.node.v6}/128")))
    with netns.entered(lab.node.netns):
        testbed = Testbed(tool_backend, NodePlan(local, local), _context(v4, v6))
        try:
            yield testbed
        finally:
            testbed.plane.close()
            for family in ("iptables", "ip6tables"):
                for table in ("filter", "nat", "mangle"):
                    for flag in ("-F", "-X"):
                        command = [f"{family}-{tool_backend}", "-w", "-t", table, flag]
                        subprocess.run(command, check=True, timeout=60)


def endpoints(of: str, *ips: str) -> EndpointSlice:
    """A slice of endpoints on this node, all with the port TARGET."""
    return slice_of(of, *(endpoint(ip, HERE) for ip in ips))


def _context(*pods: str) -> PlanContext:
    return PlanContext(
        HERE, detect_local=DetectLocal.CLUSTER_CIDR, cluster_cidrs=tuple(map(parse_network, pods))
    )
