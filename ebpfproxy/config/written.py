"""A configuration written as a KubeProxyConfiguration, which `--config` can read; kube-proxy, too, where the
mode is one of its own."""

from pathlib import Path
from typing import Any

import yaml

from ebpfproxy.config.file import API_VERSION, KIND
from ebpfproxy.config.flag_types import split_words
from ebpfproxy.config.load import Loaded
from ebpfproxy.config.option import Option
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import format_endpoint, parse_address


def write_configuration(loaded: Loaded, path: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        path.write_text(as_yaml(loaded), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", "--write-config-to names a file that can be written"
        ) from None


def as_yaml(loaded: Loaded) -> str:
    """Every option that has a field, given or not; where it has two, in both.

    What the format has no words for is lost: options without a field, an HTTP server that is switched off,
    and a least time of nothing between syncs (``--iptables-min-sync-period=0s``).
    """
    tree: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND}
    for name, option in OPTIONS.items():
        for field in option.fields:
            *sections, last = field.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = _value(loaded, name, option)
    return str(yaml.safe_dump(tree))


def _value(loaded: Loaded, name: str, option: Option) -> Any:
    """As the field has it: a boolean or a number as such, all else as text."""
    listen = {
        "healthz_bind_address": loaded.config.healthz_listen,
        "metrics_bind_address": loaded.config.metrics_listen,
    }
    if name in listen:
        address = listen[name]
        return format_endpoint(parse_address(address[0]), address[1]) if address else ""
    text = loaded.texts.get(name)
    if option.kind.many:
        return split_words(text or ())
    if option.kind.boolean or option.kind.number:
        return option.parse(text)
    return option.default if text is None else text
