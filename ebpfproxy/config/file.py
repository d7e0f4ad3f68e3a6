"""A KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1) as the texts of options.

Decoded as kube-proxy does (loadConfig in cmd/kube-proxy/app/options.go): what a strict decoder would
reject, an unknown field or one that stands twice, is reported, and then left out; of two the last counts.
What has the wrong shape is rejected.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ebpfproxy.config.document import is_null, is_zero, line, parse_document
from ebpfproxy.config.option import Option
from ebpfproxy.config.remark import Remark
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.config.unsupported_flags import FIELDS
from ebpfproxy.errors import ConfigError

API_VERSION, KIND = "kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration"
_TYPE = {"apiVersion": API_VERSION, "kind": KIND}

_KNOWN = frozenset(_TYPE) | FIELDS | {field for option in OPTIONS.values() for field in option.fields}
_SECTIONS = frozenset(field[:at] for field in _KNOWN for at, letter in enumerate(field) if letter == ".")
_SECTIONS_OF = {"ipvs": ("ipvs", "iptables")}
"""What the section ipvs has no field for, that mode takes from iptables', and from no other
(Convert_v1alpha1_KubeProxyConfiguration_To_config_KubeProxyConfiguration in pkg/proxy/apis/config)."""
_BOOLEANS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
"""YAML 1.1's words, which Kubernetes' decoder takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileReading:
    """What a file says, by the names of options. `labels`: what errors are to call each option that has a
    field, be it given or not. `problems`, a line each: what has the wrong shape.
    """

    texts: Mapping[str, Any]
    labels: Mapping[str, str]
    remarks: tuple[Remark, ...]
    problems: tuple[str, ...]


def read_configuration(path: Path, content: bytes) -> FileReading:
    """Raises ConfigError where `content` is no KubeProxyConfiguration at all."""
    root, more = parse_document(path, content)
    remarks: list[Remark] = []
    found = _fields(path, root, "", remarks) if root else {}
    for field, wanted in _TYPE.items():
        node = found.pop(field, None)
        if node is None or node.value != wanted:
            at = f"{path}:{line(node)}" if node else str(path)
            raise ConfigError(f'{at}: {field}: is not "{wanted}"', f"write {field}: {wanted}")
    if more:
        remarks.append(Remark("only the first document of the configuration file counts", {"file": path}))
    return _reading(path, found, remarks)


def _reading(path: Path, found: dict[str, yaml.Node], remarks: list[Remark]) -> FileReading:
    """What these fields say; those that are set and come to nothing are remarked upon."""
    texts: dict[str, Any] = {}
    labels: dict[str, str] = {}
    problems: list[str] = []
    idle = {field for field, node in found.items() if not is_zero(node)}
    mode = str(found["mode"].value) if "mode" in found else ""
    for name, option in OPTIONS.items():
        candidates = _fields_in(option, mode)
        field = next((each for each in candidates if _is_set(option, found.get(each))), None)
        if field is None:
            if candidates:
                labels[name] = f"{path}: {candidates[0]}"
            continue
        node = found[field]
        labels[name] = f"{path}:{line(node)}: {field}"
        idle -= {each for each in option.fields if each in found and found[each].value == node.value}
        try:
            texts[name] = _text(option, node)
        except ValueError as error:
            problems.append(f"{labels[name]}: {error}")
    if idle:
        values = {"file": path, "fields": ", ".join(sorted(idle))}
        remarks.append(Remark("fields of the configuration file have no effect here", values))
    return FileReading(texts, labels, tuple(remarks), tuple(problems))


def _is_set(option: Option, node: yaml.Node | None) -> bool:
    """As opposed to a field that is absent, or as good as that."""
    return node is not None and not is_null(node) and not (option.zero_is_unset and is_zero(node))


def _fields_in(option: Option, mode: str) -> tuple[str, ...]:
    """Those that concern a mode: only those in its own section, if the option has one there."""
    for section in _SECTIONS_OF.get(mode, (mode,)):
        own = tuple(field for field in option.fields if field.startswith(f"{section}."))
        if own:
            return own
    return option.fields


def _text(option: Option, node: yaml.Node) -> Any:
    """What the flag of this option would be given: a text, or texts for a kind that is many.

    Raises ValueError where the shape is wrong.
    """
    if option.kind.many:
        if not isinstance(node, yaml.SequenceNode):
            raise ValueError("is not a list, such as [first, second]")
        return tuple(_scalar(each).value for each in node.value)
    scalar = _scalar(node)
    if scalar.style and (option.kind.boolean or option.kind.number):
        raise ValueError(f'"{scalar.value}" is text: write it without quotes')
    if option.kind.boolean:
        return _BOOLEANS.get(scalar.value.lower(), scalar.value)
    return scalar.value or None


def _scalar(node: yaml.Node) -> yaml.ScalarNode:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("is not a single value")
    return node


def _fields(path: Path, node: yaml.Node, within: str, remarks: list[Remark]) -> dict[str, yaml.Node]:
    """The fields that are known, by their whole names; what else there is, is remarked upon."""
    if not isinstance(node, yaml.MappingNode):
        hint = "" if within else f"begin with apiVersion: {API_VERSION}"
        raise ConfigError(f"{path}:{line(node)}: {within or KIND}: is not a mapping, field: value", hint)
    found: dict[str, yaml.Node] = {}
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line(key)}: {within or KIND}: a field has a name, not a collection")
        field = f"{within}.{key.value}".removeprefix(".")
        place = {"file": path, "line": line(key), "field": field}
        if field in seen:
            found = {name: found[name] for name in found if not f"{name}.".startswith(f"{field}.")}
            remarks.append(Remark("a field stands twice in the configuration file; the last counts", place))
        seen.add(field)
        dotted = "." in key.value  # no path, but a name that nothing has
        if field in _KNOWN and not dotted:
            found[field] = value
        elif field not in _SECTIONS or dotted:
            meant = difflib.get_close_matches(field, sorted(_KNOWN | _SECTIONS), 1)
            advice = {"hint": f"did you mean {meant[0]}?"} if meant else {}
            remarks.append(Remark("unknown field in the configuration file", place | advice))
        elif not is_null(value):
            found |= _fields(path, value, field, remarks)
    return found
