"""Differences between the kernel and the desired state, for readers. Pure."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from ebpfproxy.backends.delta import diff
from ebpfproxy.model.address import Address, format_address

MISSING, UNEXPECTED, DIFFERENT = "missing", "unexpected", "different"

_LONGEST = 160  # characters of a value
_ADDRESS = 16  # bytes


class Difference(NamedTuple):
    """One difference. `key` names the object. `state` is MISSING, UNEXPECTED or DIFFERENT, of the object in
    the kernel. `detail` says what differs, "" if `state` says everything."""

    key: str
    state: str
    detail: str = ""

    def __str__(self) -> str:
        """
        >>> str(Difference("connect4", MISSING)), str(Difference("a", DIFFERENT, "have 1; want 2"))
        ('connect4: missing', 'a: different: have 1; want 2')
        """
        return ": ".join(filter(None, self))


def _as_it_is(key: Any, entry: Any) -> Any:
    return entry


def compare(
    actual: Mapping[Any, Any],
    desired: Mapping[Any, Any],
    shown: Callable[[Any, Any], Any] = _as_it_is,
) -> list[Difference]:
    """Return one difference for each key, sorted. `shown(key, entry)` is the form of an entry for readers.

    >>> compare({"a": 1, "b": 2}, {"b": 3, "c": 4})[1]
    Difference(key='b', state='different', detail='have 2; want 3')
    >>> compare({"a": 1}, {"a": 1})
    []
    """
    delta = diff(actual, desired)
    found = [Difference(str(key), UNEXPECTED) for key in delta.drops]
    for key, want in delta.puts.items():
        if key in actual:
            detail = describe(shown(key, actual[key]), shown(key, want))
            found.append(Difference(str(key), DIFFERENT, detail))
        else:
            found.append(Difference(str(key), MISSING))
    return sorted(found)


def describe(have: Any, want: Any) -> str:
    """Say in short what differs between two values that are not equal. Of sequences, name the first place.

    >>> describe((1, 2, 3), (1, 4, 3))
    'number 2: have 2; want 4'
    >>> describe((1, 2), (1, 2, 5))
    'number 3: have nothing; want 5'
    """
    if type(have) is type(want) and isinstance(have, Sequence) and not isinstance(have, str | bytes):
        names = getattr(have, "_fields", None)
        if names:
            pairs = ((name, getattr(have, name), getattr(want, name)) for name in names)
            return "; ".join(f"{name}: {describe(a, b)}" for name, a, b in pairs if a != b)
        places = enumerate(zip_longest(have, want), 1)
        number, (one, other) = next((n, pair) for n, pair in places if pair[0] != pair[1])
        return f"number {number}: have {_text(one)}; want {_text(other)}"
    return f"have {_text(have)}; want {_text(want)}"


def _text(value: Any) -> str:
    """
    >>> _text(None), _text("")
    ('nothing', 'nothing')
    """
    shown = "nothing" if value is None or value in ("", ()) else text(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def text(value: Any) -> str:
    """Return a value for readers, on one line: addresses instead of bytes, and the names of fields.

    >>> text((1, "a", bytes(15) + bytes([1]))), text(Difference("a", MISSING))
    ('1 a ::1', 'a: missing')
    """
    if isinstance(value, bytes):
        return format_address(Address(value)) if len(value) == _ADDRESS else value.hex()
    if isinstance(value, tuple) and type(value).__str__ is object.__str__:
        names = getattr(value, "_fields", None)
        members = zip(names, value, strict=True) if names else (("", each) for each in value)
        return " ".join(f"{name}={text(each)}" if name else text(each) for name, each in members)
    return str(value)
