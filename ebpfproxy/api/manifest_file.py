"""One file of manifests, from bytes to events. YAML is turned into JSON, so that `parse` has one entrance.

YAML is read as its version 1.2 core schema says: no dates, no yes and no, no base 60, under which an
address such as 1:20 would be a number. Keys are the text that stands in the file.
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
except ImportError:  # PyYAML built without libyaml: the same, much slower
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

_SAFE_DEPTH = 4000
_MAX_DEPTH = 200
"""PyYAML composes libyaml's nodes by recursion in C: some 50 000 levels end the process. Files that could be
nested deeper than `_SAFE_DEPTH` are looked at more closely, and then may not be deeper than `_MAX_DEPTH`."""
_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"

_LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"
"""What libyaml itself says of more than 1000 levels, since PyYAML 6.0.4."""

_MAX_EXPANDED = 10_000_000
"""How many values a document may have with its aliases written out ("billion laughs")."""

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
    """An event, and where it comes from: ``services.yaml:12``, the line on which its document starts."""

    where: str
    event: Event


class Unreadable(InvalidObject):
    """The file as a whole does not parse. The message says where and why."""


class _Loader(_SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own way

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """With a bound: merge keys that merge merge keys grow as aliases do."""
        super().flatten_mapping(node)
        if len(node.value) > _MAX_MERGED:
            problem = "too many merged keys"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """With the keys as they are written: ``on`` and ``1`` are labels like any other."""
        self.flatten_mapping(node)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def read_manifest(name: str, content: bytes, node_name: str) -> list[Located]:
    """All objects of the file `name`, JSON where that ends in ``.json``, else YAML of many documents.

    Raises Unreadable, with a message such as ``services.yaml:12: did not find expected key``.
    """
    if name.endswith(".json"):
        return _json(name, content.removeprefix(_BOM), node_name)
    return [Located(at, event) for at, raw in _yaml(name, content) for event in _events(at, raw, node_name)]


def _events(where: str, raw: bytes, node_name: str) -> list[Event]:
    """Those of one document; an Invalid names its file and line."""
    if not raw:
        return [Invalid(MANIFEST, where, f"{where}: it cannot be written as JSON")]
    events = parse_manifest_object(raw, node_name)
    return [_placed(where, event) if isinstance(event, Invalid) else event for event in events]


def _placed(where: str, event: Invalid) -> Invalid:
    name = where if event.name.startswith("(") else event.name
    return Invalid(event.kind, name, f"{where}: {event.reason}")


def _json(name: str, content: bytes, node_name: str) -> list[Located]:
    """The one value of a JSON file."""
    where = f"{name}:1"
    events = _events(where, content, node_name)
    if not content or any(isinstance(event, Invalid) for event in events):
        _check_json(name, content)
    return [Located(where, event) for event in events]


def _check_json(name: str, content: bytes) -> None:
    """Raise Unreadable, with the line, where the syntax is what is wrong."""
    try:
        msgspec.json.decode(content, type=msgspec.Raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        found = _BYTE.search(str(error))
        line = _line(content, int(found[1]) if found else len(content))
        raise Unreadable(f"{name}:{line}: {error}") from None


def _line(content: bytes, position: int) -> int:
    return content.count(b"\n", 0, position) + 1


def _yaml(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """The documents of a YAML file as JSON, empty ones left out; b"" where JSON has no way to say it."""
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
        last = _line(content, len(content.rstrip()))  # libyaml counts one more at the end of the file
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
    except Exception as error:  # an explicit tag (!!bool maybe) makes PyYAML raise about anything
        raise Unreadable(f"{where}: {type(error).__name__}: {error}") from None


def _check_depth(name: str, content: bytes) -> None:
    """Raise Unreadable where nodes are nested too deep. Costs a second parse where they could be.

    Each block collection within another starts further to the right, but for a sequence in a mapping.
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
    """b"" where the value cannot be JSON: it contains itself, or is too large with its aliases expanded."""
    try:
        if aliases and _size(value, {}) > _MAX_EXPANDED:
            return b""
        return msgspec.json.encode(value)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return b""


def _size(value: Any, known: dict[int, int]) -> int:
    """How many values there are in `value`, itself included, each alias counted as what it stands for."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if id(value) not in known:
        known[id(value)] = _MAX_EXPANDED + 1  # what a value that contains itself amounts to
        known[id(value)] = 1 + sum(_size(one, known) for one in inner)
    return known[id(value)]
