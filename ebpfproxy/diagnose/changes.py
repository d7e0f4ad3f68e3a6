"""Objects of a mode as lines: all of them, and those that differ from the desired state.

``dump objects``, ``dump --diff`` and ``dump --drift`` show them.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ebpfproxy.backends.difference import text
from ebpfproxy.backends.interface import Inspection
from ebpfproxy.config import Config
from ebpfproxy.diagnose.verify import Inspectable, Verified


class ObjectDiff(NamedTuple):
    """One object that differs.

    - `state`: "missing", "unexpected" or "different", of the object in the kernel.
    - `actual`: the lines that only the kernel has. `desired`: those that only the plan has. Both are empty
      for an object without content.
    - `detail`: what differs if no line does, for example the position of a program. "" for nothing.
    """

    object: str
    state: str
    actual: list[str]
    desired: list[str]
    detail: str


class Diff(NamedTuple):
    """`objects`: sorted by object. `compared`: the number of desired objects."""

    mode: str
    compared: int
    objects: tuple[ObjectDiff, ...]


def diff(mode: Inspectable, config: Config, result: Verified) -> Diff:
    """Return the objects that differ by the result of `verify`. Raises KernelError."""
    if not result.differences:
        return Diff(mode.name, result.compared, ())
    inspection = mode.inspect(config)
    try:
        return Diff(mode.name, result.compared, tuple(_objects(result, inspection)))
    finally:
        inspection.close()


def _objects(result: Verified, inspection: Inspection[Any, Any]) -> list[ObjectDiff]:
    actual, desired = inspection.read(), result.desired
    keys = {str(key): key for key in (*actual, *desired)}
    found = []
    for each in result.differences:
        key = keys.get(each.key)
        have = lines(inspection.shown(key, actual[key])) if key in actual else []
        want = lines(inspection.shown(key, desired[key])) if key in desired else []
        only_have, only_want = _without_common(have, want)
        detail = "" if only_have or only_want else each.detail
        found.append(ObjectDiff(each.key, each.state, only_have, only_want, detail))
    return found


def entries(mode: Inspectable, config: Config) -> list[tuple[str, list[str]]]:
    """All objects of a mode in the kernel, each with its content as lines, sorted. Raises KernelError."""
    inspection = mode.inspect(config)
    try:
        found = inspection.read()
        return sorted((str(key), lines(inspection.shown(key, entry))) for key, entry in found.items())
    finally:
        inspection.close()


def lines(content: Any) -> list[str]:
    """Return an entry for readers: one line for each member of a sequence, with the name of its field.

    >>> lines(("a", "b")), lines("x"), lines(True), lines(())
    (['a', 'b'], ['x'], [], [])
    """
    names = getattr(content, "_fields", None)
    if names and all(isinstance(name, str) for name in names):
        return [f"{name}: {line}" for name in names for line in lines(getattr(content, name))]
    if isinstance(content, Sequence) and not isinstance(content, str | bytes) and not names:
        return [text(each) for each in content]
    return [] if content is True or content is None or content == "" else [text(content)]


def _without_common(have: list[str], want: list[str]) -> tuple[list[str], list[str]]:
    """Remove the lines that both have, as often as both have them. If only the order differs, all stay."""
    if sorted(have) == sorted(want):
        return (have, want) if have != want else ([], [])
    common = collections.Counter(have) & collections.Counter(want)
    return _less(have, common), _less(want, common)


def _less(of: list[str], common: Mapping[str, int]) -> list[str]:
    left = collections.Counter(common)
    kept = []
    for line in of:
        if left[line] > 0:
            left[line] -= 1
        else:
            kept.append(line)
    return kept
