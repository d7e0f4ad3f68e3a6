"""route_localnet opens 127.0.0.0/8 to neighbors (CVE-2020-8558): it is set after its guard, never without.

The mode is as the agent has it, in a network namespace of its own.
"""

import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.backends.iptables.mode import IptablesMode
from ebpfproxy.backends.mode import Callbacks
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables.iptables import Iptables, ToolBackend
from ebpfproxy.model.cluster import ClusterState

pytestmark = pytest.mark.kernel

LOCALNET = "net/ipv4/conf/all/route_localnet"
GUARD = "block incoming localnet connections"
STATES = "RELATED,ESTABLISHED,DNAT"


class Agent:
    """A mode at work, as it is at the start of an agent."""

    def __init__(self, tool_backend: ToolBackend, **options: str) -> None:
        self.tool_backend = tool_backend
        texts = {"hostname_override": "here", "proxy_mode": "iptables", "iptables_backend": str(tool_backend)}
        config = Config.parse(texts | {"conntrack_max_per_core": "0"} | options)
        callbacks = Callbacks(lambda removed, failed: None, lambda devices: None)
        self.serving = ActiveMode(IptablesMode(), config, callbacks)
        self.serving.open()

    def sync(self) -> SyncResult:
        self.serving.plan_all(ClusterState({}, {}))
        return self.serving.sync(verify=True)

    def rules(self, chain: str) -> str:
        command = [f"iptables-{self.tool_backend}", "-w", "-S", chain]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def is_guarded(self) -> bool:
        """Whether each packet for the node, or from it, passes the rule."""
        jumps = all("-j KUBE-FIREWALL" in self.rules(chain) for chain in ("INPUT", "OUTPUT"))
        return jumps and GUARD in self.rules("KUBE-FIREWALL")


@pytest.fixture(params=ToolBackend)
def agent(request: pytest.FixtureRequest) -> Iterator[Agent]:
    with netns.throw_away():
        netns.set_loopback_up()
        made = Agent(request.param)
        try:
            yield made
        finally:
            made.serving.close()


@pytest.fixture
def guarded(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each time that route_localnet is set: whether the guard was in force then."""
    seen: list[bool] = []
    ensure = sysctl.ensure

    def watch(name: str, value: str) -> bool:
        if name == LOCALNET:
            seen.append(agent.is_guarded())
        return ensure(name, value)

    monkeypatch.setattr(sysctl, "ensure", watch)
    return seen


def test_it_is_set_once_its_guard_is_in_force(agent: Agent, guarded: list[bool]) -> None:
    assert sysctl.read(LOCALNET) == "0", "the agent is open, and no rule is in force"
    assert not guarded
    for _ in range(2):
        assert agent.sync().rejected == 0
    assert sysctl.read(LOCALNET) == "1"
    assert guarded == [True]


@pytest.mark.parametrize("what", ["the rule", "a jump"])
def test_a_guard_that_the_kernel_does_not_take_leaves_it_off(
    what: str, agent: Agent, guarded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other rule is in force, so that Services are served."""
    restore = Iptables.restore
    found, bad = {
        "the rule": (f"--ctstate {STATES}", "--ctstate NO_SUCH_STATE"),
        "a jump": ("INPUT -j KUBE-FIREWALL", "INPUT -m no-such-match -j KUBE-FIREWALL"),
    }[what]

    def spoil(tool: Iptables, text: str) -> None:
        restore(tool, text.replace(found, bad))

    with monkeypatch.context() as spoilt:
        spoilt.setattr(Iptables, "restore", spoil)
        assert agent.sync().rejected
    assert not agent.is_guarded()
    assert "-j KUBE-SERVICES" in agent.rules("OUTPUT")
    assert (sysctl.read(LOCALNET), guarded) == ("0", [])
    assert agent.sync().rejected == 0
    assert (sysctl.read(LOCALNET), guarded) == ("1", [True])


def test_a_sync_that_fails_leaves_it_off(
    agent: Agent, guarded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tool: Iptables, text: str) -> None:
        raise KernelError("another process holds the lock")

    with monkeypatch.context() as failing:
        failing.setattr(Iptables, "restore", fail)
        with pytest.raises(KernelError):
            agent.sync()
    assert (sysctl.read(LOCALNET), guarded) == ("0", [])


def test_without_node_ports_on_loopback_it_is_left_alone() -> None:
    with netns.throw_away():
        agent = Agent(ToolBackend.LEGACY, iptables_localhost_nodeports="false")
        try:
            agent.sync()
            assert agent.is_guarded()
            assert sysctl.read(LOCALNET) == "0"
        finally:
            agent.serving.close()
