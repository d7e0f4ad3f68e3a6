"""Combine flags and the configuration file into one configuration."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.config.handover import Handover
from ebpfproxy.config.settings import EXTERNAL_IPS_GATE, OPTIONS, Config
from ebpfproxy.errors import ConfigError

IGNORED_FLAGS = "Ignoring flags, the configuration file takes precedence"
"""`flags` have a field in the configuration file, which alone counts."""

GATES_WITHOUT_EFFECT = "Ignoring feature gates that have no effect"
"""ebpfproxy does not have `gates`."""

CONFIG_REJECTED = "Cannot apply the changed configuration, keeping the current one"
"""`reason` names the flag or field."""

_FLAGS_WITHOUT_FILE = ("healthz_port", "metrics_port")
"""These flags have no field. kube-proxy still ignores them if there is a file (Options.Complete)."""


class Remark(NamedTuple):
    """A warning about a valid configuration. It is kept until logging is set up, which needs options."""

    message: str
    values: Mapping[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and its sources.

    - `flags`: the texts of the flags given, by option name;
    - `texts`: the text that each option was parsed from, by option name;
    - `content`: the content of the file that is in effect; None without a file.
    - `seen`: the content of the file when it was read last. It differs from `content` if it was rejected.
    - `previous`: the content that was in effect before a restart, if it can replace `content`; else None.
    """

    config: Config
    remarks: tuple[Remark, ...]
    flags: Mapping[str, Any]
    texts: Mapping[str, Any]
    content: bytes | None
    seen: bytes | None = None
    previous: bytes | None = None

    def reload(self) -> "Loaded":
        """Load the same flags with the current file. Raises ConfigError."""
        return load(self.flags)


def load_after(flags: Mapping[str, Any], handover: Handover | None) -> Loaded:
    """Load the configuration as `load`, for a process that a previous run has replaced by itself.

    The content that was in effect before the restart is used again if the file is invalid, or if it is the
    one with which a start has failed. Raises ConfigError.
    """
    if handover is None or not flags.get("config"):
        return load(flags)
    from ebpfproxy.config import document

    try:
        seen = document.read(OPTIONS["config"].parse(flags["config"]))
        if seen != handover.rejected:
            return dataclasses.replace(load(flags, seen), previous=handover.content)
        remarks: tuple[Remark, ...] = ()
    except ConfigError as failure:
        remarks = (Remark(CONFIG_REJECTED, {"why": "restart", "reason": failure.message}),)
    loaded = load(flags, handover.content)
    return dataclasses.replace(loaded, remarks=(*loaded.remarks, *remarks), seen=seen)


def load(flags: Mapping[str, Any], content: bytes | None = None) -> Loaded:
    """Load the configuration from flags, by option name, and the file that --config names.

    `content` replaces that of the file.

    As in kube-proxy, options with a field are taken only from the file, except `Option.over_file`. A remark
    names the flags that are ignored.

    Raises one ConfigError, with a line for each invalid option.
    """
    path = OPTIONS["config"].parse(flags.get("config"))
    if path is None:
        config = Config.parse(flags)
        return Loaded(config, _gates_without_effect(config), flags, flags, None)
    from ebpfproxy.config import document, file  # not at the top: YAML is needed only for a file

    content = document.read(path) if content is None else content
    reading = file.read_configuration(path, content)
    texts, labels, ignored = _combined(flags, reading.texts, reading.labels)
    config = Config.parse(texts, labels, reading.problems)
    remarks = (*reading.remarks, *_remarks(path, ignored), *_gates_without_effect(config))
    return Loaded(config, remarks, flags, texts, content, seen=content)


def _combined(
    flags: Mapping[str, Any], file_texts: Mapping[str, Any], file_labels: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the effective texts, the names of options in errors, and the flags that are ignored."""
    texts, labels = dict(file_texts), dict(file_labels)
    ignored = []
    for name, option in OPTIONS.items():
        given = flags.get(name)
        if given is None or given == ():
            continue
        if (option.fields and not option.over_file) or name in _FLAGS_WITHOUT_FILE:
            ignored.append(option.flag)
        elif given != "" or not option.fields:
            texts[name] = given
            labels.pop(name, None)
    return texts, labels, ignored


def _remarks(path: Path, ignored: list[str]) -> tuple[Remark, ...]:
    if not ignored:
        return ()
    return (Remark(IGNORED_FLAGS, {"flags": ", ".join(ignored), "file": path}),)


def _gates_without_effect(config: Config) -> tuple[Remark, ...]:
    gates = sorted({name for name, _ in config.feature_gates} - {EXTERNAL_IPS_GATE})
    return (Remark(GATES_WITHOUT_EFFECT, {"gates": ", ".join(gates)}),) if gates else ()
