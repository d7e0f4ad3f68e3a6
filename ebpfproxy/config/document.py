"""Read and parse a configuration file into a tree of YAML nodes, with line numbers and duplicate fields.

JSON is parsed as YAML, as Kubernetes does. Aliases and deeply nested nodes are rejected. Thus a tree is no
larger than its file, and recursion over it is safe.
"""

from pathlib import Path

import yaml

from ebpfproxy.errors import ConfigError

try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # PyYAML was built without libyaml: same result, slower
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

_MAX_BYTES = 1 << 20
"""The size limit of a ConfigMap."""
_MAX_DEPTH = 30

_LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"
"""The error of libyaml for more than 1000 levels, since PyYAML 6.0.4."""

_NULL = "tag:yaml.org,2002:null"
_HINT = "give a KubeProxyConfiguration file, YAML or JSON, with --config"


def read(path: Path) -> bytes:
    """Return the content of a configuration file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror}", _HINT) from None
    if len(content) > _MAX_BYTES:
        limit = f"{_MAX_BYTES >> 20} MiB"
        raise ConfigError(f"cannot read configuration file {path}: it is larger than {limit}", _HINT)
    return content


def parse_document(path: Path, content: bytes) -> tuple[yaml.Node | None, int]:
    """Return the first document, None if there is none, and the number of further, non-empty documents.

    Raises ConfigError, with the line.
    """
    try:
        _check(path, content)
        documents = list(yaml.compose_all(content, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        last = content.rstrip().count(b"\n") + 1  # libyaml may count one line too many
        problem = error.problem or error.context
        if problem == _LIBYAML_TOO_DEEP:
            problem = f"nested deeper than {_MAX_DEPTH} levels"
        raise _unreadable(path, min(mark.line + 1, last) if mark else 1, problem) from None
    except yaml.reader.ReaderError as error:
        raise _unreadable(path, content.count(b"\n", 0, error.position) + 1, error.reason) from None
    except yaml.YAMLError as error:
        raise _unreadable(path, 1, str(error)) from None
    return next(iter(documents), None), sum(not is_null(each) for each in documents[1:])


def is_null(node: yaml.Node) -> bool:
    return node.tag == _NULL


def is_zero(node: yaml.Node) -> bool:
    """Whether the value is Go's zero value. For a type that is not a pointer, Go treats it as not given.

    A mapping counts as a struct of Go, which is zero if all of its fields are. A map of Go, such as
    featureGates, and a list are zero only if they are empty.
    """
    if isinstance(node, yaml.MappingNode):
        return all(is_zero(value) for _, value in node.value)
    if isinstance(node, yaml.SequenceNode):
        return not node.value
    text = str(node.value)
    return is_null(node) or text in ("", "0", "false", "False", "FALSE") or _is_zero_duration(text)


def _is_zero_duration(text: str) -> bool:
    """
    >>> [_is_zero_duration(text) for text in ("0s", "0h0m0s", "10s", "hm")]
    [True, True, False, False]
    """
    return text[:1] == "0" and not text.strip("0.hmsnuµ")


def line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _check(path: Path, content: bytes) -> None:
    """Raise ConfigError for aliases, and for nodes nested too deep for libyaml's recursion in C."""
    depth = 0
    for event in yaml.parse(content, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > _MAX_DEPTH:
            problem = "aliases (*name) are not supported; write the value out"
            if depth > _MAX_DEPTH:
                problem = f"nested deeper than {_MAX_DEPTH} levels"
            raise _unreadable(path, event.start_mark.line + 1 if event.start_mark else 1, problem)


def _unreadable(path: Path, at: int, problem: str | None) -> ConfigError:
    return ConfigError(f"{path}:{at}: {problem}", "correct the file: it must be YAML or JSON")
