"""Imports submodules of a large package without the rest of it.

The `__init__.py` of some packages imports all of their parts. A package that is *represented* has an empty
module with the same search path in its place, so that its submodules can be imported alone. The packages are
represented until the process ends.
"""

import importlib.util
import sys
import threading
from types import ModuleType

lock = threading.RLock()
"""Held by callers from `represent` until their imports have ended."""


def represent(*packages: str) -> bool:
    """Represent these packages: a top-level package and packages in it, in this order.

    Does nothing if the first is imported already or missing. Returns whether they are represented.
    """
    top = packages[0]
    if top not in sys.modules:
        found = importlib.util.find_spec(top)
        if found is None or not found.submodule_search_locations:
            return False
        root = next(iter(found.submodule_search_locations))
        for name in packages:
            module = ModuleType(name)
            parent, _, last = name.rpartition(".")
            module.__path__ = [f"{root}/{last}" if parent else root]
            sys.modules[name] = module
            if parent:
                setattr(sys.modules[parent], last, module)
    return is_represented(top)


def withdraw(top: str) -> None:
    """Forget a represented package and its submodules. The next import loads the complete package."""
    if is_represented(top):
        for name in [name for name in sys.modules if name.partition(".")[0] == top]:
            del sys.modules[name]


def is_represented(package: str) -> bool:
    """Whether `represent` has added this package."""
    found = sys.modules.get(package)
    return isinstance(found, ModuleType) and found.__spec__ is None
