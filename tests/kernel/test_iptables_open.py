"""Opening the iptables backend: detected features, and the state that it does not change."""

import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.findings import FAMILY_NOT_SERVED
from ebpfproxy.backends.iptables import probes
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.entries import FILTER, Chain, Entry, Key
from ebpfproxy.backends.iptables.rules import IptablesSettings
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import Iptables, ToolBackend
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan

pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def _nowhere() -> Iterator[None]:
    with netns.throw_away():
        yield


@pytest.fixture(params=ToolBackend)
def plane(request: pytest.FixtureRequest) -> Iterator[IptablesBackend]:
    """A backend that is not open."""
    made = IptablesBackend(IptablesSettings(), request.param)
    yield made
    made.close()


def without(monkeypatch: pytest.MonkeyPatch, *families: Family) -> None:
    """Simulate a machine without tools for these families."""
    find = iptables.find

    def found(family: Family, tool_backend: ToolBackend) -> Iptables:
        if family in families:
            raise Unsupported(f"no iptables for {family.value}", "apt-get install iptables")
        return find(family, tool_backend)

    monkeypatch.setattr(iptables, "find", found)


def node(plane: IptablesBackend) -> dict[Key, Entry]:
    return plane.render((), NodePlan())


def test_opening_writes_no_rule_and_may_be_repeated(plane: IptablesBackend) -> None:
    for _ in range(2):
        plane.open()
        assert plane.read() == {}
    assert subprocess.run(["nft", "list", "tables"], capture_output=True, check=True).stdout == b""


@pytest.mark.parametrize("missing", Family)
def test_a_family_without_tools_is_omitted_and_logged(
    missing: Family,
    plane: IptablesBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    without(monkeypatch, missing)
    plane.open()
    assert FAMILY_NOT_SERVED in caplog.text
    (served,) = {key.family for key in node(plane)}
    assert served is not missing
    assert not plane.apply(_all_of(node(plane)))
    assert plane.read() == node(plane)


def test_without_tools_for_any_family_opening_fails(
    plane: IptablesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *Family)
    with pytest.raises(Unsupported, match="cannot serve any address family"):
        plane.open()


@pytest.mark.parametrize(("value", "rules"), [("0", 3), ("1", 2)])
def test_invalid_packets_are_not_dropped_if_conntrack_is_liberal(
    value: str, rules: int, plane: IptablesBackend
) -> None:
    sysctl.ensure("net/netfilter/nf_conntrack_tcp_be_liberal", value)
    plane.open()
    forward = node(plane)[Chain(Family.IPV4, FILTER, "KUBE-FORWARD")]
    assert isinstance(forward, tuple)
    assert len(forward) == rules


def test_by_default_the_nodes_tool_backend_is_used() -> None:
    iptables.find(Family.IPV4, ToolBackend.LEGACY).restore("*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n")
    plane = IptablesBackend(IptablesSettings(), probes.AUTO)
    plane.open()
    assert not plane.apply(_all_of(node(plane)))
    plane.close()
    assert "KUBE-SERVICES" in iptables.find(Family.IPV4, ToolBackend.LEGACY).save()
    assert "KUBE-SERVICES" not in iptables.find(Family.IPV4, ToolBackend.NFT).save()


def _all_of(entries: dict[Key, Entry]) -> Delta[Key, Entry]:
    return Delta(entries, frozenset())
