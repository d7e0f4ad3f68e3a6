"""What versions.toml pins."""

import functools
from pathlib import Path
from typing import Any

import msgspec

_FILE = Path(__file__).with_name("versions.toml")


class Chart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Helm chart of a network plugin. `repository`: its URL."""

    name: str
    repository: str
    version: str
    namespace: str
    values: dict[str, Any] = {}


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network plugin. `behind`: the plugin of kind that remains. Without one, kind installs none."""

    family: str
    behind: str = ""
    plugins: list[str] = []
    charts: list[Chart] = []
    manifest: str = ""


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`node_images`: by the minor version of Kubernetes, the oldest first. `networks`: by name."""

    kind: str
    conformance: str
    node_images: dict[str, str]
    networks: dict[str, Network]


@functools.cache
def versions() -> Versions:
    return msgspec.toml.decode(_FILE.read_bytes(), type=Versions)
