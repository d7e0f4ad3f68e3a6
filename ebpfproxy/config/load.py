"""Flags and file together: what counts of both, and what is to be said of it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebpfproxy.config.remark import Remark
from ebpfproxy.config.settings import OPTIONS, Config

_FOR_FLAGS_ALONE = ("healthz_port", "metrics_port")
"""No field has them, yet with a file kube-proxy does not look at them (Options.Complete)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and where it comes from.

    `flags`: the texts of the flags given. `texts`: what each option was made from, by its name. `content`:
    of the file, as it was read; None without one.
    """

    config: Config
    remarks: tuple[Remark, ...]
    flags: Mapping[str, Any]
    texts: Mapping[str, Any]
    content: bytes | None

    def again(self) -> "Loaded":
        """The same flags, and the file as it is now. Raises ConfigError."""
        return load(self.flags)


def load(flags: Mapping[str, Any]) -> Loaded:
    """The configuration that flags, by the names of options, make, with the file that --config names.

    As with kube-proxy, what has a field in the file is taken from the file alone, with few exceptions
    (`Option.over_file`); a flag that is not looked at is remarked upon.

    Raises one ConfigError, with a line for each option that is wrong.
    """
    path = OPTIONS["config"].parse(flags.get("config"))
    if path is None:
        return Loaded(Config.parse(flags), (), flags, flags, None)
    from ebpfproxy.config import document, file  # only now: without a file, YAML is not needed

    content = document.read(path)
    said = file.read_configuration(path, content)
    texts, labels, idle = _combined(flags, said.texts, said.labels)
    config = Config.parse(texts, labels, said.problems)
    return Loaded(config, (*said.remarks, *_remarks(path, idle)), flags, texts, content)


def _combined(
    flags: Mapping[str, Any], said: Mapping[str, Any], labels_of_file: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The texts that count, what to call options in errors, and the flags that were given for nothing."""
    texts, labels = dict(said), dict(labels_of_file)
    idle = []
    for name, option in OPTIONS.items():
        given = flags.get(name)
        if given is None or given == ():
            continue
        if (option.fields and not option.over_file) or name in _FOR_FLAGS_ALONE:
            idle.append(option.flag)
        elif given != "" or not option.fields:
            texts[name] = given
            labels.pop(name, None)
    return texts, labels, idle


def _remarks(path: Path, idle: list[str]) -> tuple[Remark, ...]:
    if not idle:
        return ()
    values = {"flags": ", ".join(idle), "file": path}
    return (Remark("flags are not looked at, since the configuration file counts", values),)
