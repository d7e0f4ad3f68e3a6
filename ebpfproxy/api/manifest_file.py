"""Parse one manifest file into events. YAML is converted to JSON, so that `parse` handles one format.

YAML is read by the core schema of YAML 1.2: no dates, no `yes` and `no`, no base 60. In base 60, a text such
as 1:20 would be a number. Keys keep the text in the file.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import yaml

from ebpfproxy.api.event import Event, Invalid
from ebpfproxy.api.parse import MANIFEST, parse_manifest_object
from ebpfproxy.errors import InvalidObject

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML was built without libyaml: same result, much slower
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

_SAFE_DEPTH = 4000
_MAX_DEPTH = 200
"""PyYAML composes nodes by recursion in C: about 50,000 levels crash the process. Only files that may exceed
`_SAFE_DEPTH` are parsed for their depth, which must not exceed `_MAX_DEPTH`."""
_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"

_LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"
"""The error of libyaml for more than 1000 levels, since PyYAML 6.0.4."""

_MAX_EXPANDED = 10_000_000
"""The most values of a document with all aliases expanded ("billion laughs")."""

_MAX_MERGED = 100_000
_BOM = b"\xef\xbb\xbf"
_BYTE = re.compile(r"\(byte (\d+)\)")
_CORE = [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,18}|0o?[0-7]{1,20}|0x[0-9a-fA-F]{1,16})", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*|(?=[eE])))(?:[eE][-+]?[0-9]{1,3})?", "-+.0123456789"),
    ("merge", r"<<", "<"),
]


class Located(NamedTuple):
    """An event and its origin: ``services.yaml:12``, the file and the first line of the document."""

    where: str
    event: Event


class Unreadable(InvalidObject):
    """The file does not parse. The message has the file, the line and the reason."""


class _Loader(_SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as PyYAML declares it

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Flatten merge keys up to a limit: nested merge keys grow as nested aliases do."""
        super().flatten_mapping(node)
        if len(node.value) > _MAX_MERGED:
            problem = "too many merged keys"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping with keys as written: ``on`` and ``1`` are valid labels."""
        self.flatten_mapping(node)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def read_manifest(name: str, content: bytes, node_name: str) -> list[Located]:
    """Return all objects of the file `name`: one JSON document if it ends in ``.json``, else YAML documents.

    Raises Unreadable, for example with the message ``services.yaml:12: did not find expected key``.
    """
    if name.endswith(".json"):
        return _json(name, content.removeprefix(_BOM), node_name)
    return [Located(at, event) for at, raw in _yaml(name, content) for event in _events(at, raw, node_name)]


def _events(where: str, raw: bytes, node_name: str) -> list[Event]:
    """Return the events of one document; an Invalid names its file and line."""
    if not raw:
        return [Invalid(MANIFEST, where, f"{where}: cannot convert the document to JSON")]
    events = parse_manifest_object(raw, node_name)
    return [_with_location(where, event) if isinstance(event, Invalid) else event for event in events]


def _with_location(where: str, event: Invalid) -> Invalid:
    name = where if event.name.startswith("(") else event.name
    return Invalid(event.kind, name, f"{where}: {event.reason}")


def _json(name: str, content: bytes, node_name: str) -> list[Located]:
    """Return the events of a JSON file, which is one document."""
    where = f"{name}:1"
    events = _events(where, content, node_name)
    if not content or any(isinstance(event, Invalid) for event in events):
        _check_json(name, content)
    return [Located(where, event) for event in events]


def _check_json(name: str, content: bytes) -> None:
    """Raise Unreadable, with the line, if the file is not valid JSON."""
    try:
        msgspec.json.decode(content, type=msgspec.Raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        found = _BYTE.search(str(error))
        line = _line(content, int(found[1]) if found else len(content))
        raise Unreadable(f"{name}:{line}: {error}") from None


def _line(content: bytes, position: int) -> int:
    return content.count(b"\n", 0, position) + 1


def _yaml(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield location and JSON of each non-empty document of a YAML file; b"" if JSON cannot express it."""
    try:
        _check_depth(name, content)
        loader = _Loader(content)
        while loader.check_node():
            node = loader.get_node()
            where = f"{name}:{node.start_mark.line + 1}" if node else name
            value = _construct(loader, node, where) if node else None
            if value is not None:
                yield where, _as_json(value, aliases=b"&" in content)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        last = _line(content, len(content.rstrip()))  # libyaml may count one line too many
        line = min(mark.line + 1, last) if mark else 1
        problem = error.problem or error.context
        if problem == _LIBYAML_TOO_DEEP:
            problem = _TOO_DEEP
        raise Unreadable(f"{name}:{line}: {problem}") from None
    except yaml.reader.ReaderError as error:
        raise Unreadable(f"{name}:{_line(content, error.position)}: {error.reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise Unreadable(f"{name}:1: {error}") from None


def _construct(loader: _Loader, node: yaml.Node, where: str) -> Any:
    try:
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except Exception as error:  # explicit tags such as "!!bool maybe" make PyYAML raise arbitrary exceptions
        raise Unreadable(f"{where}: {type(error).__name__}: {error}") from None


def _check_depth(name: str, content: bytes) -> None:
    """Raise Unreadable if nodes are nested too deep. This takes a second parse if the file may be that deep.

    The upper bound: a nested block collection is indented further, except for a sequence in a mapping.
    """
    flow = content.count(b"[") + content.count(b"{") - content.count(b"[]") - content.count(b"{}")
    if flow + 2 * max(map(len, content.splitlines()), default=0) < _SAFE_DEPTH:
        return
    depth = 0
    for event in yaml.parse(content, Loader=_SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise Unreadable(f"{name}:{line}: {_TOO_DEEP}")


def _as_json(value: Any, aliases: bool) -> bytes:
    """Return the value as JSON; b"" if it contains itself or is too large with its aliases expanded."""
    try:
        if aliases and _size(value, {}) > _MAX_EXPANDED:
            return b""
        return msgspec.json.encode(value)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return b""


def _size(value: Any, known: dict[int, int]) -> int:
    """Return the number of values in `value`, including itself, with aliases expanded."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if id(value) not in known:
        known[id(value)] = _MAX_EXPANDED + 1  # the result if the value contains itself
        known[id(value)] = 1 + sum(_size(each, known) for each in inner)
    return known[id(value)]
