"""Rules that the kernel or the tool rejects: they are identified, and all other rules are in force."""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.iptables.entries import NAT, Chain, Entry, Key, Rule, RulePosition
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import Iptables, ToolBackend
from ebpfproxy.model.address import Family
from tests.kernel.iptables_testbed import TOOL_BACKENDS, Testbed, empty_node, endpoints
from tests.support.build import service

pytestmark = pytest.mark.kernel

V4 = Family.IPV4

UNKNOWN = "-m no-such-match -j RETURN"
DNAT = "-p tcp -m tcp -j DNAT --to-destination 10.1.0.1:80"
NOT_IN_NAT = "-p tcp -m tcp -j REJECT --reject-with icmp-port-unreachable"
REJECTED_RULES = {"by the tool": UNKNOWN, "by the kernel": NOT_IN_NAT}


@pytest.fixture(params=TOOL_BACKENDS)
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    with empty_node(request.param) as made:
        yield made


@pytest.fixture(params=REJECTED_RULES)
def bad(request: pytest.FixtureRequest) -> str:
    return REJECTED_RULES[request.param]


@pytest.fixture
def restores(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The input of each run of iptables-restore, including trial runs in other namespaces."""
    given: list[str] = []
    restore = Iptables.restore

    def listen(tool: Iptables, text: str) -> None:
        given.append(text)
        restore(tool, text)

    monkeypatch.setattr(Iptables, "restore", listen)
    return given


def good(testbed: Testbed, *names: str) -> dict[Key, Entry]:
    """The desired state of the node and of valid Services."""
    return testbed.wanted(
        *(
            testbed.plans(service(name, ips=(f"10.96.1.{i}",)), endpoints(name, f"10.1.1.{i}"))
            for i, name in enumerate(names, start=1)
        )
    )


def crafted(label: str, rule: str, number: int = 1) -> dict[Key, Entry]:
    """A Service whose only endpoint's chain has this rule."""
    sep, svc = (f"KUBE-{kind}-{label:A<16}" for kind in ("SEP", "SVC"))
    match = f"-d 10.96.9.{number}/32 -p tcp -m tcp --dport 80"
    return {
        Rule(V4, NAT, "KUBE-SERVICES", f"{match} -j {svc}"): RulePosition.ANYWHERE,
        Chain(V4, NAT, svc): (f"-j {sep}",),
        Chain(V4, NAT, sep): (rule,),
    }


def saved_rules(testbed: Testbed) -> dict[str, int]:
    """The number of IPv4 rules in the kernel, by table; another program has none."""
    tool = iptables.find(V4, ToolBackend(testbed.tool_backend))
    rules = {"filter": 0, "nat": 0}
    table = ""
    for line in tool.save().splitlines():
        table = line[1:] if line.startswith("*") else table
        if line.startswith("-A "):
            rules[table] = rules.get(table, 0) + 1
    return rules


def test_the_rules_are_counted_as_the_kernel_has_them(testbed: Testbed) -> None:
    """After writing them, after changing and removing Services, and after reading them."""
    for names in (("one", "two"), ("one", "two", "three"), ("three",)):
        testbed.bring(good(testbed, *names))
        counts = testbed.plane.counts()[0]
        assert counts.rules == saved_rules(testbed)
        assert counts.rules_last["nat"] > 0
        assert (counts.restore_failures, counts.partial_failures) == (0, 0)
    testbed.plane.read()
    assert testbed.plane.counts()[0].rules == saved_rules(testbed)


def test_failures_of_restores_are_counted_and_of_changes_alone_as_partial(bad: str, testbed: Testbed) -> None:
    first, second = (crafted(label, bad, number) for number, label in enumerate(("BAD", "WORSE"), start=1))
    testbed.bring(good(testbed, "one"))
    delta = diff(wanted := good(testbed, "one"), wanted | first)
    assert testbed.plane.apply(delta)
    of_v4, of_v6 = testbed.plane.counts()
    assert of_v4.partial_failures == 1 <= of_v4.restore_failures
    assert (of_v6.restore_failures, of_v6.partial_failures) == (0, 0)
    testbed.plane.read()
    assert testbed.plane.apply(diff(wanted, wanted | second))
    assert testbed.plane.counts()[0].partial_failures == 1
    assert testbed.plane.counts()[0].restore_failures > of_v4.restore_failures
    assert testbed.plane.counts()[0].rules == saved_rules(testbed)


def test_a_rejected_service_does_not_affect_others(bad: str, testbed: Testbed) -> None:
    rest, broken = good(testbed, "one", "two"), crafted("BAD", bad)
    rejected = testbed.bring(rest | broken)
    assert rejected.keys() == broken.keys()
    assert testbed.plane.read() == rest
    chain = Chain(V4, NAT, "KUBE-SEP-BADAAAAAAAAAAAAA")
    assert str(chain) in rejected[chain].message


def test_many_rejected_services_are_found_with_few_restores(
    bad: str, testbed: Testbed, restores: list[str]
) -> None:
    rest = good(testbed, "one")
    broken: dict[Key, Entry] = {}
    for number in range(1, 100):
        broken |= crafted(f"B{number}", bad, number)
    assert testbed.bring(rest | broken).keys() == broken.keys()
    assert testbed.plane.read() == rest
    assert len(restores) < 60


def test_a_chain_whose_new_rules_are_rejected_keeps_the_previous_ones(bad: str, testbed: Testbed) -> None:
    """The chains that it jumps to and that should be removed are kept, too."""
    previous = crafted("ONE", DNAT)
    svc, sep = (key for key in previous if isinstance(key, Chain))
    assert not testbed.bring(good(testbed) | previous)
    wanted = {key: entry for key, entry in previous.items() if key != sep} | {svc: (bad,)}
    rejected = testbed.bring(good(testbed, "other") | wanted)
    assert rejected.keys() == {svc, sep}
    assert testbed.plane.read() == good(testbed, "other") | previous


def test_a_rejected_service_is_not_retried_until_the_next_read(
    bad: str, testbed: Testbed, restores: list[str]
) -> None:
    """A proxier retries at each sync. A failing restore with a search for the rejected rule takes long."""
    broken = crafted("BAD", bad)
    first = good(testbed)
    assert testbed.bring(first | broken)
    restores.clear()
    second = good(testbed, "one")
    delta = diff(first, second | broken)
    assert testbed.plane.apply(delta).keys() == broken.keys()
    assert len(restores) == 1
    assert testbed.bring(second | broken).keys() == broken.keys()
    assert testbed.plane.read() == second


def test_a_rejected_service_is_served_after_a_change(bad: str, testbed: Testbed) -> None:
    rest, broken = good(testbed, "one"), crafted("BAD", bad)
    assert testbed.bring(rest | broken)
    repaired = crafted("BAD", DNAT)
    assert not testbed.plane.apply(diff(rest, rest | repaired))
    assert testbed.plane.read() == rest | repaired


def test_an_obsolete_chain_with_a_foreign_jump_is_emptied_and_reported(testbed: Testbed) -> None:
    previous = crafted("ONE", DNAT)
    svc, _ = (key for key in previous if isinstance(key, Chain))
    assert not testbed.bring(good(testbed) | previous)
    testbed.restore(f"*nat\n:USER - [0:0]\n-A USER -j {svc.name}\nCOMMIT\n")
    rejected = testbed.bring(good(testbed, "other"))
    assert rejected.keys() == {svc}
    assert "-A USER" in rejected[svc].message
    assert testbed.plane.read() == good(testbed, "other") | {svc: ()}
    testbed.iptables("-t nat -F USER")
    assert not testbed.bring(good(testbed, "other"))


def test_a_held_xtables_lock_is_a_temporary_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(file))  # read by iptables since 1.8.3
    monkeypatch.setattr(iptables, "LOCK_PATIENCE", 1)
    with empty_node(ToolBackend.LEGACY) as testbed:
        wanted = good(testbed, "one")
        with file.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(Rejected, match="another process holds the xtables lock") as failure:
                testbed.bring(wanted)
            assert "lslocks" in failure.value.hint
        assert not testbed.bring(wanted)
