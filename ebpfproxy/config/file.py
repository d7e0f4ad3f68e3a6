"""Read and write a KubeProxyConfiguration file (kubeproxy.config.k8s.io/v1alpha1) as the texts of options.

The file is decoded as by kube-proxy (loadConfig in cmd/kube-proxy/app/options.go). Unknown and duplicate
fields, which a strict decoder rejects, are remarked upon and ignored; of duplicates the last one counts.
A field of the wrong shape is an error.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ebpfproxy.config.document import is_null, is_zero, line, parse_document
from ebpfproxy.config.flag_types import FEATURE_GATES, split_words
from ebpfproxy.config.load import Loaded, Remark
from ebpfproxy.config.option import Option
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.config.unsupported_flags import FIELDS
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import format_endpoint, parse_address

FURTHER_DOCUMENTS = "Ignoring all but the first document of the configuration file"
"""The file has several YAML documents."""
FIELDS_WITHOUT_EFFECT = "Ignoring fields of the configuration file that have no effect"
"""ebpfproxy does not have them, or they belong to a mode that is not selected."""
DUPLICATE_FIELD = "Duplicate field in the configuration file, using the last one"
"""`line` is the line of the last one."""
UNKNOWN_FIELD = "Ignoring unknown field in the configuration file"
"""kube-proxy does not have it either. `hint` names a similar field."""

_API_VERSION, _KIND = "kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration"
_TYPE = {"apiVersion": _API_VERSION, "kind": _KIND}
_FIELD_HINT = "write each field as name: value"

_KNOWN = frozenset(_TYPE) | FIELDS | {field for option in OPTIONS.values() for field in option.fields}
_SECTIONS = frozenset(field[:at] for field in _KNOWN for at, letter in enumerate(field) if letter == ".")
_SECTIONS_OF = {"ipvs": ("ipvs", "iptables")}
"""Mode ipvs takes options without a field in section ipvs from section iptables, and from no other
(Convert_v1alpha1_KubeProxyConfiguration_To_config_KubeProxyConfiguration in pkg/proxy/apis/config)."""
_BOOLEANS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
"""The booleans of YAML 1.1, which Kubernetes' decoder accepts."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileReading:
    """The content of a file.

    - `texts`: the texts of options, by option name;
    - `labels`: the names of options in errors, for each option with a field, given or not;
    - `problems`: an error for each field of the wrong shape.
    """

    texts: Mapping[str, Any]
    labels: Mapping[str, str]
    remarks: tuple[Remark, ...]
    problems: tuple[str, ...]


def read_configuration(path: Path, content: bytes) -> FileReading:
    """Parse the content of a file. Raises ConfigError if it is not a KubeProxyConfiguration."""
    root, further = parse_document(path, content)
    remarks: list[Remark] = []
    nodes = _fields(path, root, "", remarks) if root else {}
    for field, expected in _TYPE.items():
        node = nodes.pop(field, None)
        if node is None or node.value != expected:
            at = f"{path}:{line(node)}" if node else str(path)
            raise ConfigError(f'{at}: {field}: is not "{expected}"', f"write {field}: {expected}")
    if further:
        remarks.append(Remark(FURTHER_DOCUMENTS, {"file": path}))
    return _reading(path, nodes, remarks)


def _reading(path: Path, nodes: dict[str, yaml.Node], remarks: list[Remark]) -> FileReading:
    """Return the texts of options. A remark names the fields that are set and have no effect."""
    texts: dict[str, Any] = {}
    labels: dict[str, str] = {}
    problems: list[str] = []
    unused = {field for field, node in nodes.items() if not is_zero(node)}
    mode = str(nodes["mode"].value) if "mode" in nodes else ""
    for name, option in OPTIONS.items():
        candidates = _fields_in(option, mode)
        field = next((each for each in candidates if _is_set(option, nodes.get(each))), None)
        if field is None:
            if candidates:
                labels[name] = f"{path}: {candidates[0]}"
            continue
        node = nodes[field]
        labels[name] = f"{path}:{line(node)}: {field}"
        unused -= {each for each in option.fields if each in nodes and nodes[each].value == node.value}
        try:
            texts[name] = _text(option, node)
        except ValueError as error:
            problems.append(f"{labels[name]}: {error}")
    if unused:
        values = {"file": path, "fields": ", ".join(sorted(unused))}
        remarks.append(Remark(FIELDS_WITHOUT_EFFECT, values))
    return FileReading(texts, labels, tuple(remarks), tuple(problems))


def _is_set(option: Option, node: yaml.Node | None) -> bool:
    """Whether the field is present and neither null nor a zero that means not given."""
    if node is None or is_null(node):
        return False
    return not (option.zero_is_unset and isinstance(node, yaml.ScalarNode) and is_zero(node))


def _fields_in(option: Option, mode: str) -> tuple[str, ...]:
    """Return the fields that apply to a mode: those in the mode's section if there are any, else all."""
    for section in _SECTIONS_OF.get(mode, (mode,)):
        own = tuple(field for field in option.fields if field.startswith(f"{section}."))
        if own:
            return own
    return option.fields


def _text(option: Option, node: yaml.Node) -> Any:
    """Return the flag's text, or texts for a `many` kind. Raises ValueError for a wrong shape."""
    if option.kind is FEATURE_GATES:
        return _gates(node)
    if option.kind.many:
        if not isinstance(node, yaml.SequenceNode):
            raise ValueError("is not a list, such as [first, second]")
        return tuple(_scalar(each).value for each in node.value)
    scalar = _scalar(node)
    if scalar.style and (option.kind.boolean or option.kind.number):
        raise _quoted(scalar)
    if option.kind.boolean:
        return _boolean(scalar)
    return scalar.value or None


def _gates(node: yaml.Node) -> tuple[str, ...]:
    """Return the texts of a mapping of names to booleans, such as A=true. Raises ValueError."""
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("is not a mapping, such as {Name: true}")
    texts = []
    for key, value in node.value:
        name = _scalar(key).value
        try:
            if _scalar(value).style:
                raise _quoted(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        texts.append(f"{name}={_boolean(value)}")
    return tuple(texts)


def _boolean(scalar: yaml.ScalarNode) -> str:
    text = str(scalar.value)
    return _BOOLEANS.get(text.lower(), text)


def _quoted(scalar: yaml.ScalarNode) -> ValueError:
    return ValueError(f'"{scalar.value}" is text: write it without quotes')


def _scalar(node: yaml.Node) -> yaml.ScalarNode:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("is not a single value")
    return node


def _fields(path: Path, node: yaml.Node, section: str, remarks: list[Remark]) -> dict[str, yaml.Node]:
    """Return the nodes of known fields by full name. Remarks name duplicate and unknown fields."""
    if not isinstance(node, yaml.MappingNode):
        hint = _FIELD_HINT if section else f"begin the file with apiVersion: {_API_VERSION}"
        raise ConfigError(f"{path}:{line(node)}: {section or _KIND}: is not a mapping, field: value", hint)
    nodes: dict[str, yaml.Node] = {}
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            problem = f"{path}:{line(key)}: {section or _KIND}: a field name must be a single value"
            raise ConfigError(problem, _FIELD_HINT)
        field = f"{section}.{key.value}".removeprefix(".")
        location = {"file": path, "line": line(key), "field": field}
        if field in seen:
            nodes = {name: nodes[name] for name in nodes if not f"{name}.".startswith(f"{field}.")}
            remarks.append(Remark(DUPLICATE_FIELD, location))
        seen.add(field)
        dotted = "." in key.value  # a name with a dot, not a path; no field has such a name
        if field in _KNOWN and not dotted:
            nodes[field] = value
        elif field not in _SECTIONS or dotted:
            similar = difflib.get_close_matches(field, sorted(_KNOWN | _SECTIONS), 1)
            advice = {"hint": f"did you mean {similar[0]}?"} if similar else {}
            remarks.append(Remark(UNKNOWN_FIELD, location | advice))
        elif not is_null(value):
            nodes |= _fields(path, value, field, remarks)
    return nodes


# --- Writing ---


def write_configuration(loaded: Loaded, path: Path) -> None:
    """Write the file of --write-config-to. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(as_yaml(loaded), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write configuration file {path}: {error.strerror}",
            "give a writable file with --write-config-to",
        ) from None


def as_yaml(loaded: Loaded) -> str:
    """Return `as_tree` as YAML. --config reads it again, and so does kube-proxy in a mode that it has."""
    return str(yaml.safe_dump(as_tree(loaded)))


def as_tree(loaded: Loaded) -> dict[str, Any]:
    """Return a KubeProxyConfiguration with every field of every option.

    The format cannot express options without a field, an HTTP server that is off, and
    ``--iptables-min-sync-period=0s``.
    """
    tree: dict[str, Any] = dict(_TYPE)
    for name, option in OPTIONS.items():
        for field in option.fields:
            *sections, last = field.split(".")
            mapping = tree
            for section in sections:
                mapping = mapping.setdefault(section, {})
            mapping[last] = _value(loaded, name, option)
    return tree


def _value(loaded: Loaded, name: str, option: Option) -> Any:
    """Return the value for the field: a boolean, a number, a mapping, a list of texts, or a text."""
    listen = {
        "healthz_bind_address": loaded.config.healthz_listen,
        "metrics_bind_address": loaded.config.metrics_listen,
    }
    if name in listen:
        address = listen[name]
        return format_endpoint(parse_address(address[0]), address[1]) if address else ""
    text = loaded.texts.get(name)
    if option.kind is FEATURE_GATES:
        return dict(option.parse(text))
    if option.kind.many:
        return split_words(text or ())
    if option.kind.boolean or option.kind.number:
        return option.parse(text)
    return option.default if text is None else text
