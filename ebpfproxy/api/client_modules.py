"""The modules of the Kubernetes client that the agent uses, without the rest of the package.

`kubernetes/__init__.py` and those of its packages import all parts: the generated API, dynamic clients,
OAuth, and with these pydantic and requests. Measured with release 37: 20 MB and 0.19 s, instead of 1.2 MB and
0.02 s. Therefore the packages are represented by empty modules with the same search path, so that their
submodules can be imported alone.

A release whose modules have other names, or an import of the complete package elsewhere in the process, is no
problem: then the complete package is used.
"""

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any, NamedTuple

_PACKAGES = ("kubernetes", "kubernetes.client", "kubernetes.config", "kubernetes.utils")
_lock = threading.Lock()


class ClientModules(NamedTuple):
    """The classes and functions of the client. `load_kube_config` is imported with `kube_config`."""

    Configuration: Any
    RESTClientObject: Any
    ConfigException: Any
    load_incluster_config: Any


def load() -> ClientModules:
    """What is needed in a pod, and for each request. Raises ImportError."""
    with _lock:
        if "kubernetes" not in sys.modules:
            _add_packages()
        try:
            return _load()
        except (ImportError, AttributeError):
            _remove_packages()
            return _load()


def kube_config() -> Any:
    """The module that loads kubeconfig files, with its support for OAuth. Raises ImportError."""
    load()
    with _lock:
        return importlib.import_module("kubernetes.config.kube_config")


def _load() -> ClientModules:
    def imported(name: str) -> Any:
        return importlib.import_module(f"kubernetes.{name}")

    client: Any = sys.modules.get("kubernetes.client") or imported("client")
    if _is_replacement(client):
        # Other modules import these names from the package. Only new_client_from_config() uses ApiClient.
        client.Configuration, client.ApiClient = imported("client.configuration").Configuration, None
    return ClientModules(
        imported("client.configuration").Configuration,
        imported("client.rest").RESTClientObject,
        imported("config.config_exception").ConfigException,
        imported("config.incluster_config").load_incluster_config,
    )


def _add_packages() -> None:
    found = importlib.util.find_spec("kubernetes")
    if found is None or not found.submodule_search_locations:
        return
    (root,) = list(found.submodule_search_locations)[:1]
    for name in _PACKAGES:
        module = ModuleType(name)
        parent, _, last = name.rpartition(".")
        module.__path__ = [f"{root}/{last}" if parent else root]
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], last, module)


def _remove_packages() -> None:
    if _is_replacement(sys.modules.get("kubernetes")):
        for name in [name for name in sys.modules if name.partition(".")[0] == "kubernetes"]:
            del sys.modules[name]


def _is_replacement(module: object) -> bool:
    return isinstance(module, ModuleType) and module.__spec__ is None
