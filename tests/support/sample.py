"""The cases that `make test` runs: a sample of the products of parameters.

Tests have up to six parameters, such as protocol, family, mode and node. All combinations take an hour. The
sample of a file covers each pair of a test and a value, and each pair of values of two common parameters: it
is a pairwise sample, with the test as a parameter. So each test runs at least once in each mode and in each
family, and each mode with each family. A parameter is common if tests of several files have it.

A test with the mark `same_for` names parameters that do not matter to what it tests. It needs one value of
each.

The sample depends only on the tests: every run, worker and machine selects the same cases.
"""

import collections
import itertools
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_Pair = tuple[Hashable, Hashable]


class Case(NamedTuple):
    """One case of a test. `test`: its node id without parameters; `parameters`: the values by name."""

    test: str
    id: str
    parameters: Mapping[str, Any]


_RARE = "ipvs"
"""A value that many kernels do not have."""


def without(names: Collection[str], cases: Iterable[Case]) -> list[Case]:
    """The cases without these parameters, which do not matter, and without cases that many kernels skip.

    >>> given = [Case("a.py::t", f"a.py::t[{mode}]", {"mode": mode}) for mode in ("ebpf", "ipvs")]
    >>> without(["mode"], given)
    [Case(test='a.py::t', id='a.py::t[ebpf]', parameters={})]
    """
    return [
        case._replace(parameters={name: each for name, each in case.parameters.items() if name not in names})
        for case in cases
        if _RARE not in [case.parameters.get(name) for name in names]
    ]


def sample(cases: Iterable[Case]) -> frozenset[str]:
    """The ids of the selected cases, given all cases of all files in their order.

    >>> product = [{"mode": mode, "family": of} for mode in ("ebpf", "nftables") for of in ("v4", "v6")]
    >>> sorted(sample(Case("a.py::t", f"a.py::t{n}", given) for n, given in enumerate(product)))
    ['a.py::t0', 'a.py::t3']
    """
    files: dict[str, list[Case]] = {}
    for case in cases:
        files.setdefault(case.test.partition("::")[0], []).append(case)
    names = (frozenset(name for case in of_file for name in case.parameters) for of_file in files.values())
    number = collections.Counter(itertools.chain.from_iterable(names))
    common = {name for name, n in number.items() if n > 1}
    return frozenset().union(*(_sample_of_file(of_file, common) for of_file in files.values()))


def _sample_of_file(cases: Sequence[Case], common: Collection[str]) -> frozenset[str]:
    pairs = {case.id: _pairs(case, common) for case in cases}
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


def _pairs(case: Case, common: Collection[str]) -> frozenset[_Pair]:
    """The pairs that a case covers: of the test and each value, and of each two values of common
    parameters."""
    values = [(name, _comparable(value)) for name, value in sorted(case.parameters.items())]
    of_test = ((_Test(case.test), value) for value in (*values, ("", "")))
    of_values = itertools.combinations([value for value in values if value[0] in common], 2)
    return frozenset(itertools.chain(of_test, of_values))


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
