"""Combine flags and the configuration file into one configuration."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.config.settings import OPTIONS, Config

IGNORED_FLAGS = "Ignoring flags, the configuration file takes precedence"
"""`flags` have a field in the configuration file, which alone counts."""

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
    - `content`: the content of the file as it was read; None without a file.
    """

    config: Config
    remarks: tuple[Remark, ...]
    flags: Mapping[str, Any]
    texts: Mapping[str, Any]
    content: bytes | None

    def reload(self) -> "Loaded":
        """Load the same flags with the current file. Raises ConfigError."""
        return load(self.flags)


def load(flags: Mapping[str, Any]) -> Loaded:
    """Load the configuration from flags, by option name, and the file that --config names.

    As in kube-proxy, options with a field are taken only from the file, except `Option.over_file`. A remark
    names the flags that are ignored.

    Raises one ConfigError, with a line for each invalid option.
    """
    path = OPTIONS["config"].parse(flags.get("config"))
    if path is None:
        return Loaded(Config.parse(flags), (), flags, flags, None)
    from ebpfproxy.config import document, file  # not at the top: YAML is needed only for a file

    content = document.read(path)
    reading = file.read_configuration(path, content)
    texts, labels, ignored = _combined(flags, reading.texts, reading.labels)
    config = Config.parse(texts, labels, reading.problems)
    return Loaded(config, (*reading.remarks, *_remarks(path, ignored)), flags, texts, content)


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
