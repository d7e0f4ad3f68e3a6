"""`diff` and `applied` are the inverse of each other."""

from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.delta import applied, diff

KEYS = st.integers(0, 9)
ENTRIES = st.dictionaries(KEYS, st.integers(0, 3))


@given(ENTRIES, ENTRIES)
def test_applying_the_difference_results_in_desired(actual: dict[int, int], desired: dict[int, int]) -> None:
    assert applied(actual, diff(actual, desired)) == desired


@given(ENTRIES, ENTRIES)
def test_the_difference_contains_no_equal_entries(actual: dict[int, int], desired: dict[int, int]) -> None:
    delta = diff(actual, desired)
    assert all(actual.get(key) != entry for key, entry in delta.puts.items())
    assert delta.drops <= actual.keys()
    assert not delta.drops & delta.puts.keys()
    assert bool(delta) == (actual != desired)


@given(ENTRIES, ENTRIES, st.sets(KEYS))
def test_only_the_given_keys_are_compared(
    actual: dict[int, int], desired: dict[int, int], keys: set[int]
) -> None:
    result = applied(actual, diff(actual, desired, keys))
    for key in range(10):
        assert result.get(key) == (desired if key in keys else actual).get(key)


@given(ENTRIES, ENTRIES)
def test_arguments_are_not_modified(actual: dict[int, int], desired: dict[int, int]) -> None:
    before = dict(actual), dict(desired)
    applied(actual, diff(actual, desired))
    assert (actual, desired) == before
