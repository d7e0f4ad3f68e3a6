"""Imports submodules of a large package without the rest of it.

The `__init__.py` of some packages imports all of their parts. A package that is *represented* has an empty
module with the same search path in its place, so that its submodules can be imported alone. The packages are
represented until the process ends.

docs/decisions/0091-one-netlink-stack.md has the memory and the time that this saves.
"""

import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")

_lock = threading.RLock()


def load(load_parts: Callable[[], T], *packages: str) -> T:
    """The result of `load_parts`, which imports submodules of these packages: a top-level package and
    packages in it, in this order.

    If the top-level package is imported already, or if a release of it has other modules, `load_parts`
    imports the complete package. Raises ImportError.
    """
    with _lock:
        _represent(*packages)
        try:
            return load_parts()
        except (ImportError, AttributeError):
            if not is_represented(packages[0]):
                raise
            for name in [name for name in sys.modules if name.partition(".")[0] == packages[0]]:
                del sys.modules[name]
            return load_parts()


def is_represented(package: str) -> bool:
    """Whether an empty module represents this package."""
    found = sys.modules.get(package)
    return isinstance(found, ModuleType) and found.__spec__ is None


def _represent(*packages: str) -> None:
    top = packages[0]
    if top in sys.modules:
        return
    found = importlib.util.find_spec(top)
    if found is None or not found.submodule_search_locations:
        return
    root = next(iter(found.submodule_search_locations))
    for name in packages:
        module = ModuleType(name)
        parent, _, last = name.rpartition(".")
        module.__path__ = [f"{root}/{last}" if parent else root]
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], last, module)
