"""The cases that `make test` runs: a sample of the products of parameters.

Tests have up to six parameters, such as protocol, family, mode and node. All combinations take an hour. The
sample of a file covers each pair of a test and a value, and each pair of two values: it is a pairwise sample,
with the test as a parameter. So each test runs at least once in each mode and in each family.

The sample depends only on the file's tests: every run, worker and machine selects the same cases.
"""

import itertools
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_Pair = tuple[Hashable, Hashable]


class Case(NamedTuple):
    """One case of a test. `test`: its node id without parameters; `parameters`: the values by name."""

    test: str
    id: str
    parameters: Mapping[str, Any]


def sample(cases: Sequence[Case]) -> frozenset[str]:
    """The ids of the selected cases of one file.

    >>> modes = [Case("t", f"t[{mode}-{family}]", {"mode": mode, "family": family})
    ...          for mode in ("ebpf", "nftables") for family in ("v4", "v6")]
    >>> sorted(sample([*modes, Case("alone", "alone", {})]))
    ['alone', 't[ebpf-v4]', 't[ebpf-v6]', 't[nftables-v4]', 't[nftables-v6]']
    """
    pairs = {case.id: _pairs(case) for case in cases}
    covered: set[_Pair] = set()
    selected: set[str] = set()
    # First each test with each of its values: of the cases that add the same number, the one with the most
    # new pairs of values.
    for _, of_test in itertools.groupby(cases, key=lambda case: case.test):
        _cover([case.id for case in of_test], pairs, covered, selected, _is_of_test)
    _cover([case.id for case in cases], pairs, covered, selected, lambda _: True)
    return frozenset(selected)


def _cover(
    ids: Iterable[str],
    pairs: Mapping[str, frozenset[_Pair]],
    covered: set[_Pair],
    selected: set[str],
    concerns: Callable[[_Pair], bool],
) -> None:
    """Select cases until all of their pairs that concern are covered."""
    left = {each: {pair for pair in pairs[each] if concerns(pair)} for each in ids if each not in selected}
    while left:
        left = {each: found for each, found in left.items() if not found <= covered}
        if not left:
            return
        best = max(
            left, key=lambda each: (len(left[each] - covered), len(pairs[each] - covered), _rank(each))
        )
        selected.add(best)
        covered |= pairs[best]


def _pairs(case: Case) -> frozenset[_Pair]:
    """The pairs that a case covers: of the test and each value, and of each two values."""
    values = [(name, _comparable(value)) for name, value in sorted(case.parameters.items())]
    of_test = ((_Test(case.test), value) for value in (*values, ("", "")))
    return frozenset(itertools.chain(of_test, itertools.combinations(values, 2)))


class _Test(NamedTuple):
    name: str


def _is_of_test(pair: _Pair) -> bool:
    return isinstance(pair[0], _Test)


def _comparable(value: Any) -> Hashable:
    """A value that is equal for equal values of the same type."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def _rank(id_: str) -> int:
    """Decides between cases that cover equally much: by the name, so no value is always preferred."""
    return zlib.crc32(id_.encode())
