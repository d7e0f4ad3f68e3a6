"""The source of the agent's objects in a benchmark: a folder of manifests, or the lab's API server."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ebpfproxy.lab import Lab, api_server, manifests

MANIFESTS, API = "manifests", "api"
NAMES = (MANIFESTS, API)

Write = Callable[[manifests.Object], None]
"""Creates or replaces an object."""


class Source:
    """Objects of the first node's agent. At first they are those in the folder of manifests."""

    def __init__(self, name: str, lab: Lab, folder: Path) -> None:
        """`name` is one of NAMES. Start the API server if it is API; `folder` must be complete then."""
        self._name, self._lab, self._folder = name, lab, folder
        if name == API:
            node = manifests.node(lab.node_name, [lab.node.v4, lab.node.v6])
            api_server.start(lab.node, folder, node)

    @property
    def flags(self) -> Sequence[str]:
        """The flags of the agent, for `Node.agent`, after its own."""
        return ("--manifests=", f"--master={api_server.URL}") if self._name == API else ()

    def writer(self) -> Write:
        """Return the function that writes an object, for one process and thread.

        In the folder, each object has a file of its own, named after the object.
        """
        if self._name == API:
            return api_server.Writer(self._lab.node).put
        return self._write_file

    def _write_file(self, value: manifests.Object) -> None:
        manifests.write(manifest_path(self._folder, value), value)


def manifest_path(folder: Path, value: manifests.Object) -> Path:
    """Return the path of the file that contains only this object."""
    return folder / f"{value['kind'].lower()}-{value['metadata']['name']}.json"
