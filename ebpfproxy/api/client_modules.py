"""The modules of the Kubernetes client that the agent uses, without the rest of the package.

`kubernetes/__init__.py` and those of its packages import all parts: the generated API, dynamic clients,
OAuth, and with these pydantic and requests: 21 MB and 0.2 s, instead of 1.3 MB and 0.03 s (`submodules`).
"""

import importlib
import sys
from typing import Any, NamedTuple

from ebpfproxy import submodules

_PACKAGES = ("kubernetes", "kubernetes.client", "kubernetes.config", "kubernetes.utils")


class ClientModules(NamedTuple):
    """The classes and functions of the client, by their names in the client."""

    Configuration: Any
    RESTClientObject: Any
    ConfigException: Any
    load_incluster_config: Any


def load() -> ClientModules:
    """What is needed in a pod, and for each request. Raises ImportError."""
    return submodules.load(_load, *_PACKAGES)


def kube_config() -> Any:
    """The module that loads kubeconfig files, with its support for OAuth. Raises ImportError."""
    load()
    return submodules.load(lambda: _imported("config.kube_config"), *_PACKAGES)


def _load() -> ClientModules:
    if submodules.is_represented("kubernetes.client"):
        # Other modules import these names from the package. Only new_client_from_config() uses ApiClient.
        client: Any = sys.modules["kubernetes.client"]
        client.Configuration, client.ApiClient = _imported("client.configuration").Configuration, None
    return ClientModules(
        _imported("client.configuration").Configuration,
        _imported("client.rest").RESTClientObject,
        _imported("config.config_exception").ConfigException,
        _imported("config.incluster_config").load_incluster_config,
    )


def _imported(name: str) -> Any:
    return importlib.import_module(f"kubernetes.{name}")
