"""How the lines of two entries are compared."""

from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.diagnose.changes import _without_common, lines
from ebpfproxy.model.address import parse_address

_LINES = st.lists(st.sampled_from("abc"), max_size=6)


@given(have=_LINES, want=_LINES)
def test_only_lines_that_differ_are_left(have: list[str], want: list[str]) -> None:
    only_have, only_want = _without_common(have, want)
    assert (not only_have and not only_want) == (have == want)
    if sorted(have) != sorted(want):
        assert not Counter(only_have) & Counter(only_want)
        assert Counter(have) - Counter(only_have) == Counter(want) - Counter(only_want)


class _Port(NamedTuple):
    number: int
    address: bytes


class _Entry(NamedTuple):
    ports: tuple[_Port, ...]
    text: str
    nothing: tuple[str, ...] = ()


def test_an_entry_has_a_line_for_each_member_of_its_fields() -> None:
    entry = _Entry((_Port(80, parse_address("10.0.0.1")), _Port(81, parse_address("fd00::1"))), "x")
    assert lines(entry) == [
        "ports: number=80 address=10.0.0.1",
        "ports: number=81 address=fd00::1",
        "text: x",
    ]
