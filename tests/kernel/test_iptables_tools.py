"""The interface to the iptables tools and tables, tested with the kernel."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.nft import notifications
from ebpfproxy.linux.nft.notifications import Changes
from ebpfproxy.linux.xtables import iptables, legacy
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected, ToolBackend
from ebpfproxy.model.address import Family
from tests.support.confined import as_nobody

pytestmark = pytest.mark.kernel

NOT_IN_NAT = "-p tcp -j REJECT"  # in the table nat


@pytest.fixture(autouse=True)
def _nowhere() -> Iterator[None]:
    with netns.throw_away():
        yield


@pytest.fixture(params=[(of, tool_backend) for of in Family for tool_backend in ToolBackend], ids=str)
def tool(request: pytest.FixtureRequest) -> Iptables:
    return iptables.find(*request.param)


@pytest.fixture(params=Family)
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=60)


def test_restored_rules_are_saved(tool: Iptables) -> None:
    tool.restore('*nat\n:ONE - [0:0]\n-A ONE -p tcp -m comment --comment "a  b" -j ACCEPT\nCOMMIT\n')
    assert '\n-A ONE -p tcp -m comment --comment "a  b" -j ACCEPT\n' in tool.save()
    assert tool.show("nat", "ONE")
    assert not tool.show("nat", "TWO")
    assert not tool.show("mangle", "ONE")


_AS_NOBODY = """
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.xtables import iptables, legacy
from ebpfproxy.model.address import Family
legacy.tables = lambda family: {"nat"}
for tool_backend in iptables.ToolBackend:
    try:
        print(iptables.find(Family.IPV4, tool_backend).show("nat", "ONE"))
    except KernelError as failure:
        print(failure.message)
"""


def test_show_without_permission_raises_instead_of_reporting_no_chain() -> None:
    command = [*as_nobody(), sys.executable, "-c", _AS_NOBODY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    messages = done.stdout.splitlines()
    assert [line.split(":")[0] for line in messages] == [
        f"iptables-{of} cannot show ONE" for of in ToolBackend
    ]


def test_a_comment_that_is_not_utf_8_is_preserved(tool: Iptables) -> None:
    tool.restore("*filter\n-A INPUT -m comment --comment \udcff -j ACCEPT\nCOMMIT\n")
    assert "\udcff" in tool.save()


def test_restore_keeps_chains_that_it_does_not_name(tool: Iptables) -> None:
    tool.restore("*nat\n:ONE - [0:0]\n-A ONE -j ACCEPT\n-A OUTPUT -j ONE\nCOMMIT\n")
    tool.restore("*nat\n:TWO - [0:0]\nCOMMIT\n")
    assert {"-A ONE -j ACCEPT", "-A OUTPUT -j ONE", ":TWO - [0:0]"} <= set(tool.save().splitlines())


def test_saving_creates_no_table(tool: Iptables) -> None:
    tool.save()
    assert not tool.show("mangle", "ONE")
    assert legacy.tables(tool.family) == frozenset()
    assert subprocess.run(["nft", "list", "tables"], capture_output=True, check=True).stdout == b""


def test_a_line_rejected_by_the_tool_is_named(tool: Iptables) -> None:
    with pytest.raises(LinesRejected, match="rejected line 4, -A ONE -m no-such") as failure:
        tool.restore("*nat\n:ONE - [0:0]\n-A ONE -j ACCEPT\n-A ONE -m no-such -j ACCEPT\nCOMMIT\n")
    assert list(failure.value.lines) == [4]
    assert not tool.show("nat", "ONE")


def test_lines_rejected_by_the_kernel_are_named_by_line_or_table(tool: Iptables) -> None:
    with pytest.raises(LinesRejected) as failure:
        tool.restore(
            "*filter\n:ONE - [0:0]\nCOMMIT\n"
            f"*nat\n:ONE - [0:0]\n-A ONE {NOT_IN_NAT}\n-A ONE -j ACCEPT\n-A ONE {NOT_IN_NAT}\nCOMMIT\n"
        )
    assert list(failure.value.lines) == ([9] if tool.tool_backend is ToolBackend.LEGACY else [6, 8])
    assert tool.show("filter", "ONE")
    assert not tool.show("nat", "ONE")


def test_a_missing_table_raises_unsupported(tool: Iptables) -> None:
    if tool.tool_backend is ToolBackend.LEGACY:
        with pytest.raises(Unsupported, match="unable to initialize"):
            tool.restore("*no-such\nCOMMIT\n")


# Fingerprints of iptables-legacy


def test_a_fingerprint_of_an_unused_table_does_not_create_it(family: Family) -> None:
    assert legacy.fingerprint(family, "nat") == b""
    assert legacy.tables(family) == frozenset()


def test_equal_rules_have_equal_fingerprints_and_changes_other_ones(family: Family) -> None:
    tool = iptables.find(family, ToolBackend.LEGACY)
    seen = []
    for line in (":A - [0:0]", "-A A -j ACCEPT", "-A OUTPUT -j A", "-D OUTPUT -j A", "-F A", "-X A"):
        tool.restore(f"*nat\n{line}\nCOMMIT\n")
        seen.append(legacy.fingerprint(family, "nat"))
        assert legacy.fingerprint(family, "nat") == seen[-1]
    assert len(set(seen)) == 4
    assert seen[1] == seen[3]
    assert seen[0] == seen[4]
    assert legacy.tables(family) == {"nat"}


# Changes of iptables-nft


def own_change(table: str, chain: str) -> bool:
    return (table, chain) == ("nat", "OURS")


@pytest.fixture
def changes() -> Iterator[Changes]:
    made = Changes(frozenset({"nat"}), own_change)
    yield made
    made.close()


@pytest.mark.parametrize(
    "line",
    [
        ":OURS - [0:0]",
        "-A OURS -j ACCEPT",
        "-R OURS 1 -j RETURN",
        "-D OURS 1",
        "-F OURS",
        "-X UNUSED",
        "-D OUTPUT -p udp -j RETURN",
    ],
)
def test_changes_of_the_agents_chains_are_counted(line: str, family: Family, changes: Changes) -> None:
    tool = iptables.find(family, ToolBackend.NFT)
    tool.restore(
        "*nat\n:OURS - [0:0]\n:UNUSED - [0:0]\n-A OURS -j ACCEPT\n-A OUTPUT -p udp -j RETURN\nCOMMIT\n"
    )
    before = changes.count()
    assert changes.count() == before
    tool.restore(f"*nat\n{line}\nCOMMIT\n")
    assert (changes.count() > before) is ("UNUSED" not in line)


def test_a_deleted_table_is_counted(changes: Changes) -> None:
    iptables.find(Family.IPV4, ToolBackend.NFT).restore("*nat\n:THEIRS - [0:0]\nCOMMIT\n")
    before = changes.count()
    run("nft flush ruleset")
    assert changes.count() > before


def test_foreign_changes_are_not_counted(family: Family, changes: Changes) -> None:
    tool = iptables.find(family, ToolBackend.NFT)
    tool.restore("*nat\n:THEIRS - [0:0]\n-A THEIRS -j ACCEPT\n-A OUTPUT -j THEIRS\nCOMMIT\n")
    tool.restore("*filter\n:OURS - [0:0]\n-A OURS -j ACCEPT\nCOMMIT\n*filter\n-F OURS\n-X OURS\nCOMMIT\n")
    run("nft add table inet nat")
    run("nft add chain inet nat OURS")
    run("nft delete table inet nat")
    assert changes.count() == 0


def test_lost_notifications_are_counted(monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    monkeypatch.setattr(notifications, "_FEW_BYTES", 4096)
    changes = Changes(frozenset({"nat"}), own_change)
    try:
        rules = "".join(f"-A THEIRS -p tcp -m tcp --dport {port} -j ACCEPT\n" for port in range(1, 2000))
        iptables.find(family, ToolBackend.NFT).restore(f"*nat\n:THEIRS - [0:0]\n{rules}COMMIT\n")
        assert changes.count() > 0
    finally:
        changes.close()
