"""A configuration file as a tree of YAML nodes, which know their lines and show what stands twice.

JSON is read as the YAML that it is, as Kubernetes does. Aliases are rejected, and nodes are not nested
deeply: so a tree is no larger than its file, and may be walked by recursion.
"""

from pathlib import Path

import yaml

from ebpfproxy.errors import ConfigError

try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # PyYAML built without libyaml: the same, slower
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

_MOST_BYTES = 1 << 20
"""As much as a ConfigMap holds."""
_MAX_DEPTH = 30

_LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"
"""What libyaml itself says of more than 1000 levels, since PyYAML 6.0.4."""

_NULL = "tag:yaml.org,2002:null"


def read(path: Path) -> bytes:
    """The content of a configuration file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", "--config names a KubeProxyConfiguration: YAML or JSON"
        ) from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path}: is larger than {_MOST_BYTES >> 20} MiB", "is it the file that is meant?")
    return content


def parse_document(path: Path, content: bytes) -> tuple[yaml.Node | None, int]:
    """The first document, None where there is none, and how many follow it that say something.

    Raises ConfigError, with the line.
    """
    try:
        _check(path, content)
        documents = list(yaml.compose_all(content, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        last = content.rstrip().count(b"\n") + 1  # libyaml counts one more at the end of the file
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
    """Whether this is what Go takes for a field that was not given, if its type is no pointer."""
    if isinstance(node, yaml.MappingNode):
        return all(is_zero(value) for _, value in node.value)
    if isinstance(node, yaml.SequenceNode):
        return all(map(is_zero, node.value))
    text = str(node.value)
    return is_null(node) or text in ("", "0", "false", "False", "FALSE") or _is_no_time(text)


def _is_no_time(text: str) -> bool:
    """
    >>> _is_no_time("0s"), _is_no_time("0h0m0s"), _is_no_time("10s"), _is_no_time("hm")
    (True, True, False, False)
    """
    return text[:1] == "0" and not text.strip("0.hmsnuµ")


def line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _check(path: Path, content: bytes) -> None:
    """Raise ConfigError where the file has aliases, or nodes nested too deep for libyaml's recursion in C."""
    depth = 0
    for event in yaml.parse(content, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > _MAX_DEPTH:
            problem = "aliases (*name) are not read; write the value out"
            if depth > _MAX_DEPTH:
                problem = f"nested deeper than {_MAX_DEPTH} levels"
            raise _unreadable(path, event.start_mark.line + 1 if event.start_mark else 1, problem)


def _unreadable(path: Path, at: int, problem: str | None) -> ConfigError:
    return ConfigError(f"{path}:{at}: {problem}", "it has to be YAML, or JSON")
