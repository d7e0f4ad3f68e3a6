"""The sample of `make test`: what it covers, and that it is always the same."""

import itertools
import random
from collections.abc import Mapping, Sequence

from tests.support.sample import Case, sample

MODES = ("ebpf", "nftables", "iptables", "userspace")
FAMILIES = ("v4", "v6")
PROTOCOLS = ("tcp", "udp", "sctp")


def product(test: str, **parameters: Sequence[str]) -> list[Case]:
    combinations = (
        dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())
    )
    return [Case(test, f"{test}[{'-'.join(each.values())}]", each) for each in combinations]


FILE = [
    *product("test_a", mode=MODES, family=FAMILIES, protocol=PROTOCOLS),
    *product("test_b", mode=MODES, family=FAMILIES),
    Case("test_c", "test_c", {}),
    *product("test_d", family=FAMILIES),
]


def selected(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.id in sample(cases)]


def values(parameters: Mapping[str, str]) -> set[tuple[str, str]]:
    return set(parameters.items())


def test_each_test_runs_with_each_of_its_values() -> None:
    for test in {case.test for case in FILE}:
        of_test = [case for case in FILE if case.test == test]
        found = [case for case in selected(FILE) if case.test == test]
        assert found
        assert set().union(*(values(case.parameters) for case in found)) == set().union(
            *(values(case.parameters) for case in of_test)
        )


def test_each_two_values_occur_together_in_some_test_of_the_file() -> None:
    def pairs(cases: Sequence[Case]) -> set[frozenset[tuple[str, str]]]:
        return {
            frozenset(pair)
            for case in cases
            for pair in itertools.combinations(sorted(values(case.parameters)), 2)
        }

    assert pairs(selected(FILE)) == pairs(FILE)


def test_most_of_a_product_is_left_out() -> None:
    (a,) = [list(each) for key, each in itertools.groupby(FILE, lambda case: case.test) if key == "test_a"]
    assert len(selected(a)) <= len(MODES) * len(PROTOCOLS) + 2 < len(a)


def test_the_sample_is_always_the_same() -> None:
    assert sample(FILE) == sample(FILE)
    of_test = [list(each) for _, each in itertools.groupby(FILE, lambda case: case.test)]
    for each in of_test:
        shuffled = random.Random(1).sample(each, len(each))
        assert sample(shuffled) == sample(each)


def test_values_that_cannot_be_hashed_are_compared_by_their_text() -> None:
    cases = [
        Case("t", f"t[{n}-{family}]", {"flags": [n], "family": family}) for n in (1, 2) for family in FAMILIES
    ]
    assert len(selected(cases)) == len(cases)
    assert len(selected([*cases, Case("t", "again", cases[0].parameters)])) == len(cases)


def test_equal_values_of_other_types_are_different() -> None:
    assert len(selected([Case("t", "one", {"given": 1}), Case("t", "true", {"given": True})])) == 2
