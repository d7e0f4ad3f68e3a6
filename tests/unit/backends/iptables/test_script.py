"""The input of iptables-restore, run by a model that rejects the same lines as the real tool."""

import copy
import hashlib
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.iptables.chains import LAYOUT
from ebpfproxy.backends.iptables.entries import (
    BUILT_IN,
    FILTER,
    MANGLE,
    NAT,
    Chain,
    Entry,
    Key,
    Rule,
    RulePosition,
    SharedChain,
    TableState,
    parse,
    target_chain,
)
from ebpfproxy.backends.iptables.script import compose
from ebpfproxy.model.address import Family

V4 = Family.IPV4

Tables = dict[str, dict[str, list[str]]]


class Kernel:
    """The tables, and their states after each COMMIT."""

    def __init__(self) -> None:
        self.tables: Tables = {table: {name: [] for name in BUILT_IN} for table in (FILTER, NAT, MANGLE)}
        self.commits: list[Tables] = []

    def restore(self, text: str) -> None:
        table = ""
        pending: dict[str, list[str]] = {}
        for line in text.splitlines():
            if line.startswith("*"):
                table = line[1:]
                pending = copy.deepcopy(self.tables[table])
            elif line == "COMMIT":
                self.tables[table] = pending
                self.commits.append(copy.deepcopy(self.tables))
            else:
                self._run(line, pending)

    def saved(self) -> str:
        lines = []
        for table, chains in self.tables.items():
            lines.append(f"*{table}")
            lines += [f":{name} {'ACCEPT' if name in BUILT_IN else '-'} [0:0]" for name in chains]
            lines += [f"-A {name} {rule}" for name, rules in chains.items() for rule in rules]
            lines.append("COMMIT")
        return "\n".join(lines) + "\n"

    @staticmethod
    def _run(line: str, chains: dict[str, list[str]]) -> None:
        command, _, rest = line.partition(" ")
        name, _, rule = rest.partition(" ")
        if line.startswith(":"):
            assert rest == "- [0:0]"
            chains[command[1:]] = []
        elif command == "-N":
            assert name not in chains, line
            chains[name] = []
        elif command == "-X":
            assert not chains.pop(name), f"{line}: not empty"
            assert not any(target_chain(each) == name for rules in chains.values() for each in rules), line
        elif command == "-D":
            chains[name].remove(rule)
        else:
            assert not target_chain(rule).startswith("KUBE-") or target_chain(rule) in chains, (
                f"{line}: leads nowhere"
            )
            chains[name].insert(0 if command == "-I" else len(chains[name]), rule)


NODE: dict[Key, Entry] = {
    SharedChain(V4, NAT, "KUBE-SERVICES"): (),
    SharedChain(V4, NAT, "KUBE-NODEPORTS"): (),
    SharedChain(V4, FILTER, "KUBE-SERVICES"): (),
    SharedChain(V4, FILTER, "KUBE-EXTERNAL-SERVICES"): (),
    Chain(V4, NAT, "KUBE-MARK-MASQ"): ("-j MARK --set-xmark 0x4000/0x4000",),
    Chain(V4, MANGLE, "KUBE-PROXY-CANARY"): (),
    Rule(V4, NAT, "PREROUTING", "-j KUBE-SERVICES"): RulePosition.FIRST,
    Rule(V4, FILTER, "FORWARD", "-j KUBE-SERVICES"): RulePosition.FIRST,
    Rule(V4, FILTER, "FORWARD", "-j KUBE-EXTERNAL-SERVICES"): RulePosition.FIRST,
    Rule(V4, NAT, "KUBE-SERVICES", "-m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"): RulePosition.LAST,
}


def serving(name: str, endpoints: frozenset[int], external: bool, counted: bool = False) -> dict[Key, Entry]:
    """Return the entries of a Service, in the shape of real ones."""
    svc, ext = f"KUBE-SVC-{name}", f"KUBE-EXT-{name}"
    if not endpoints:
        return {Rule(V4, FILTER, "KUBE-SERVICES", f"-d {name} -j REJECT"): RulePosition.ANYWHERE}
    seps = [f"KUBE-SEP-{name}{number}" for number in sorted(endpoints)]
    entries: dict[Key, Entry] = {
        Rule(V4, NAT, "KUBE-SERVICES", f"-d {name} -j {svc}"): RulePosition.ANYWHERE,
        Chain(V4, NAT, svc): ("-s 10.1.0.0/16 -j KUBE-MARK-MASQ", *(f"-j {sep}" for sep in seps)),
    }
    for sep in seps:
        entries[Chain(V4, NAT, sep)] = ("-j KUBE-MARK-MASQ", f"-j DNAT --to-destination {sep}")
    if external:
        entries[Rule(V4, NAT, "KUBE-NODEPORTS", f"-p {name} -j {ext}")] = RulePosition.LAST
        if counted:
            text = f"-d 127.0.0.0/8 -p {name} -m nfacct --nfacct-name x -j {ext}"
            entries[Rule(V4, NAT, "KUBE-NODEPORTS", text)] = RulePosition.ANYWHERE
        entries[Chain(V4, NAT, ext)] = ("-j KUBE-MARK-MASQ", f"-j {svc}")
    return entries


@st.composite
def clusters(draw: st.DrawFn) -> dict[Key, Entry]:
    entries = dict(NODE)
    for name in draw(st.frozensets(st.sampled_from("ABCDE"))):
        endpoints = draw(st.frozensets(st.integers(0, 4)))
        entries |= serving(name, endpoints, draw(st.booleans()), draw(st.booleans()))
    return entries


def bring(kernel: Kernel, wanted: Mapping[Key, Entry], block: int | None) -> None:
    entries, state = parse(V4, kernel.saved(), LAYOUT)
    kernel.restore(compose(diff(entries, wanted), state, LAYOUT, block).text)


@given(st.lists(clusters(), min_size=1, max_size=5), st.sampled_from([None, 1, 2, 3, 300]))
def test_any_history_ends_in_its_last_state(history: list[dict[Key, Entry]], block: int | None) -> None:
    """Nothing is rejected on the way, with pieces of any size."""
    kernel = Kernel()
    for wanted in history:
        bring(kernel, wanted, block)
        assert parse(V4, kernel.saved(), LAYOUT)[0] == wanted
        counted = ["nfacct" in rule for rule in kernel.tables[NAT].get("KUBE-NODEPORTS", ())]
        assert counted == sorted(counted, reverse=True), "a rule that counts nothing matches first"


@given(clusters(), clusters(), st.sampled_from([None, 1, 2, 300]))
def test_no_packet_meets_a_partly_written_chain(
    before: dict[Key, Entry], after: dict[Key, Entry], block: int | None
) -> None:
    kernel = Kernel()
    bring(kernel, before, block)
    kernel.commits.clear()
    bring(kernel, after, block)
    for tables in kernel.commits:
        for table, chains in tables.items():
            for name in reachable(chains):
                key = Chain(V4, table, name)
                assert tuple(chains[name]) in (before.get(key), after.get(key))


@given(clusters(), clusters(), st.sampled_from([None, 1, 300]))
def test_a_frontend_is_translated_or_rejected_at_every_moment(
    before: dict[Key, Entry], after: dict[Key, Entry], block: int | None
) -> None:
    """If this is so before and after the change. In between, a frontend may have both rules; then it is
    translated.
    """
    kernel = Kernel()
    bring(kernel, before, block)
    kernel.commits.clear()
    served = frontends_served(kernel.tables)
    bring(kernel, after, block)
    served &= frontends_served(kernel.tables)
    for tables in kernel.commits:
        assert served <= frontends_served(tables)


def frontends_served(tables: Tables) -> set[str]:
    rules = [rule for table in (NAT, FILTER) for rule in tables[table].get("KUBE-SERVICES", ())]
    return {rule.split()[1] for rule in rules if rule.startswith("-d ")}


def reachable(chains: Mapping[str, list[str]]) -> set[str]:
    """Return the chains of one plan that a packet may reach."""
    found: set[str] = set()
    left = [*BUILT_IN]
    while left:
        targets = {target_chain(rule) for rule in chains[left.pop()]} & chains.keys() - found
        found |= targets
        left += targets
    return {name for name in found if name.startswith(("KUBE-SVC", "KUBE-SEP", "KUBE-EXT"))}


def lines(delta: Delta[Key, Entry], state: TableState | None = None, block: int | None = None) -> list[str]:
    return compose(delta, state or TableState(set(), {}, {}), LAYOUT, block).text.split("\n")


def test_an_empty_delta_has_an_empty_script() -> None:
    assert not compose(Delta({}, frozenset()), TableState(set(), {}, {}), LAYOUT, None)


def test_chains_for_iptables_nft_are_in_no_alphabetical_order() -> None:
    """iptables-nft sorts chains by a recursion with the first one as the pivot, and its stack is limited."""
    names = sorted(f"KUBE-SEP-{hashlib.sha256(b'%d' % n).hexdigest()[:16].upper()}" for n in range(5000))
    puts: dict[Key, Entry] = {Chain(V4, NAT, name): () for name in names}
    written = [line.split()[0] for line in lines(Delta(puts, frozenset()), block=300) if line.startswith(":")]
    assert sorted(written) == [f":{name}" for name in names]
    assert depth(written) < 60


def test_the_masquerading_chain_is_written_together_with_kube_services() -> None:
    """With mode ipvs, a chain of the same name masquerades that mode's connections until its rules are
    removed.
    """
    names = [f"KUBE-SEP-{n:016X}" for n in range(30)]
    puts: dict[Key, Entry] = {
        Chain(V4, NAT, name): () for name in ["KUBE-POSTROUTING", "KUBE-SERVICES", *names]
    }
    written = lines(Delta(puts, frozenset()), block=10)
    last = written[[at for at, line in enumerate(written) if line == "*nat"][-1] :]
    assert {":KUBE-POSTROUTING - [0:0]", ":KUBE-SERVICES - [0:0]"} < set(last)
    assert written.count("COMMIT") > 1


def depth(names: list[str]) -> int:
    deepest, left = 0, [(names, 1)]
    while left:
        (middle, *rest), level = left.pop()
        deepest = max(deepest, level)
        sides = [each for each in rest if each < middle], [each for each in rest if each > middle]
        left += [(side, level + 1) for side in sides if side]
    return deepest


def test_only_tables_with_a_change_are_written() -> None:
    chain = Chain(V4, NAT, "KUBE-SEP-A")
    assert lines(Delta({chain: ("-j RETURN",)}, frozenset())) == [
        "*nat",
        ":KUBE-SEP-A - [0:0]",
        "-A KUBE-SEP-A -j RETURN",
        "COMMIT",
        "",
    ]


def test_filter_rejects_before_nat_stops_translating_and_stops_after_nat_translates() -> None:
    rejecting = Rule(V4, FILTER, "KUBE-SERVICES", "-d A -j REJECT")
    leading = Rule(V4, NAT, "KUBE-SERVICES", "-d B -j KUBE-SVC-B")
    state = TableState(set(), {Rule(V4, FILTER, "KUBE-SERVICES", "-d B -j REJECT"): 1}, {})
    puts: dict[Key, Entry] = {rejecting: RulePosition.ANYWHERE, leading: RulePosition.ANYWHERE}
    tables = [line for line in lines(Delta(puts, frozenset(state.copies)), state) if line.startswith("*")]
    assert tables == ["*filter", "*nat", "*filter"]


def test_an_existing_shared_chain_is_not_emptied() -> None:
    shared = SharedChain(V4, NAT, "KUBE-SERVICES")
    assert lines(Delta({shared: ()}, frozenset()), TableState({shared}, {}, {})) == [""]


def test_a_duplicate_rule_is_deleted_as_often_as_it_exists() -> None:
    rule = Rule(V4, NAT, "KUBE-SERVICES", "-d A -j KUBE-SVC-A")
    gone = lines(Delta({}, frozenset({rule})), TableState(set(), {rule: 3}, {}))
    assert gone.count(f"-D KUBE-SERVICES {rule.text}") == 3


def test_an_absent_rule_is_not_deleted() -> None:
    rule = Rule(V4, NAT, "KUBE-SERVICES", "-d A -j KUBE-SVC-A")
    assert lines(Delta({}, frozenset({rule}))) == [""]


@pytest.mark.parametrize("foreign", [True, False])
def test_a_chain_that_foreign_rules_jump_to_is_emptied_and_stays(foreign: bool) -> None:
    chain = Chain(V4, NAT, "KUBE-SVC-A")
    state = TableState(set(), {}, {chain: "-A MINE -j KUBE-SVC-A"} if foreign else {})
    gone = lines(Delta({}, frozenset({chain})), state)
    assert ":KUBE-SVC-A - [0:0]" in gone
    assert ("-X KUBE-SVC-A" in gone) is not foreign


def test_each_line_has_its_entry_as_owner() -> None:
    chain, rule = Chain(V4, NAT, "KUBE-SVC-A"), Rule(V4, NAT, "KUBE-SERVICES", "-d A -j KUBE-SVC-A")
    script = compose(
        Delta({chain: ("-j RETURN",), rule: RulePosition.ANYWHERE}, frozenset()),
        TableState(set(), {}, {}),
        LAYOUT,
        1,
    )
    numbers = range(1, len(script.text.splitlines()) + 1)
    owners = {script.line(number): script.owner(number) for number in numbers}
    assert owners == {
        "*nat": None,
        ":KUBE-SVC-A - [0:0]": chain,
        "-A KUBE-SVC-A -j RETURN": chain,
        f"-I KUBE-SERVICES {rule.text}": rule,
        "COMMIT": None,
    }
