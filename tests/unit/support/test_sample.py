"""The sample of `make test`: what it covers, and that it is always the same."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from tests.support.sample import Case, sample, without

MODES = ("ebpf", "nftables", "iptables", "userspace")
FAMILIES = ("v4", "v6")
PROTOCOLS = ("tcp", "udp", "sctp")


def product(test: str, **parameters: Sequence[Any]) -> list[Case]:
    combinations = (
        dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())
    )
    return [Case(test, f"{test}[{'-'.join(map(str, each.values()))}]", each) for each in combinations]


A = product("a.py::test_a", mode=MODES, family=FAMILIES, protocol=PROTOCOLS)
FILES = [
    *A,
    *product("a.py::test_b", mode=MODES, change=("flush", "delete", "edit")),
    Case("a.py::test_c", "a.py::test_c", {}),
    *product("b.py::test_d", protocol=PROTOCOLS, family=FAMILIES),
    *product("b.py::test_e", mode=MODES),
]
COMMON = {"mode", "family", "protocol"}


def selected(cases: Sequence[Case]) -> list[Case]:
    found = sample(cases)
    return [case for case in cases if case.id in found]


def of_file(cases: Sequence[Case], file: str) -> list[Case]:
    return [case for case in cases if case.test.startswith(file)]


def values(cases: Sequence[Case], test: str) -> set[tuple[str, Any]]:
    return set().union(*(case.parameters.items() for case in cases if case.test == test))


def pairs(cases: Sequence[Case]) -> set[frozenset[tuple[str, Any]]]:
    common = ([each for each in case.parameters.items() if each[0] in COMMON] for case in cases)
    return {frozenset(pair) for each in common for pair in itertools.combinations(each, 2)}


def test_each_test_runs_with_each_of_its_values() -> None:
    found = selected(FILES)
    for test in {case.test for case in FILES}:
        assert any(case.test == test for case in found)
        assert values(found, test) == values(FILES, test)


def test_each_two_values_of_common_parameters_occur_together_in_each_file() -> None:
    for file in ("a.py", "b.py"):
        assert pairs(of_file(selected(FILES), file)) == pairs(of_file(FILES, file))


def test_most_of_a_product_is_left_out() -> None:
    found = [case.test for case in selected(FILES)]
    assert found.count("a.py::test_a") <= len(MODES) * len(PROTOCOLS) + 2 < len(A)
    assert found.count("a.py::test_b") == len(MODES), "no other file has the parameter `change`"


def test_a_parameter_that_does_not_matter_is_tried_with_one_value() -> None:
    found = sample([*without(["mode"], A), *FILES[len(A) :]])
    of_a = [case for case in A if case.id in found]
    assert {case.parameters["family"] for case in of_a} == set(FAMILIES)
    assert {case.parameters["protocol"] for case in of_a} == set(PROTOCOLS)
    assert len(of_a) <= len(FAMILIES) * len(PROTOCOLS)
    assert len(sample(without(["mode"], product("c.py::test_f", mode=(*MODES, "ipvs"))))) == 1


def test_the_sample_is_always_the_same() -> None:
    assert sample(FILES) == sample(FILES)
    shuffled = random.Random(1).sample(A, len(A))
    assert sample(shuffled) == sample(A)


def test_values_that_cannot_be_hashed_are_compared_by_their_text() -> None:
    cases = [Case("t", f"t[{n}]", {"flags": [n]}) for n in (1, 2, 3)]
    assert len(selected([*cases, Case("t", "again", {"flags": [1]})])) == len(cases)


def test_equal_values_of_other_types_are_different() -> None:
    assert len(selected([Case("t", "one", {"given": 1}), Case("t", "true", {"given": True})])) == 2
