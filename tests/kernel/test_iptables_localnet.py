"""route_localnet opens 127.0.0.0/8 to neighbors (CVE-2020-8558): it is set only after its guard rule.

The mode runs with the agent's configuration in a separate network namespace.
"""

import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.backends.iptables.mode import IptablesMode
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
    """An open mode, as at the start of an agent."""

    def __init__(self, tool_backend: ToolBackend, **options: str) -> None:
        self.tool_backend = tool_backend
        texts = {"hostname_override": "here", "proxy_mode": "iptables", "iptables_backend": str(tool_backend)}
        config = Config.parse(texts | {"conntrack_max_per_core": "0"} | options)
        callbacks = Callbacks()
        self.serving = ActiveMode(IptablesMode(), config, callbacks)
        self.serving.open()

    def sync(self) -> SyncResult:
        self.serving.plan_all(ClusterState({}, {}))
        return self.serving.sync(verify=True)

    def rules(self, chain: str) -> str:
        command = [f"iptables-{self.tool_backend}", "-w", "-S", chain]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def is_guarded(self) -> bool:
        """Whether the guard rule applies to all packets to and from the node."""
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
    """For each time that route_localnet was set: whether the guard was in force."""
    seen: list[bool] = []
    ensure = sysctl.ensure

    def watch(name: str, value: str) -> bool:
        if name == LOCALNET:
            seen.append(agent.is_guarded())
        return ensure(name, value)

    monkeypatch.setattr(sysctl, "ensure", watch)
    return seen


def test_route_localnet_is_set_after_its_guard_is_in_force(agent: Agent, guarded: list[bool]) -> None:
    assert sysctl.read(LOCALNET) == "0", "the agent is open, but no rule is in force"
    assert not guarded
    for _ in range(2):
        assert agent.sync().rejected == 0
    assert sysctl.read(LOCALNET) == "1"
    assert guarded == [True]


@pytest.mark.parametrize("what", ["the rule", "a jump"])
def test_a_rejected_guard_rule_leaves_route_localnet_off(
    what: str, agent: Agent, guarded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other rules are in force, so that Services are served."""
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


def test_a_failed_sync_leaves_route_localnet_off(
    agent: Agent, guarded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tool: Iptables, text: str) -> None:
        raise KernelError("another process holds the lock")

    with monkeypatch.context() as failing:
        failing.setattr(Iptables, "restore", fail)
        with pytest.raises(KernelError):
            agent.sync()
    assert (sysctl.read(LOCALNET), guarded) == ("0", [])


def test_without_localhost_nodeports_route_localnet_is_not_changed() -> None:
    with netns.throw_away():
        agent = Agent(ToolBackend.LEGACY, iptables_localhost_nodeports="false")
        try:
            agent.sync()
            assert agent.is_guarded()
            assert sysctl.read(LOCALNET) == "0"
        finally:
            agent.serving.close()
