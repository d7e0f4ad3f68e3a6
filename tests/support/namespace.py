"""A network namespace for a test. Needs root."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

from ebpfproxy.errors import NotFound
from ebpfproxy.linux.netns import netns


class Namespace:
    """A network namespace with this name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ip(self, *lines: str) -> None:
        """Run commands of ip(8), all in one batch."""
        subprocess.run(["ip", "-n", self.name, "-batch", "-"], input="\n".join(lines).encode(), check=True)

    def tc(self, *lines: str) -> None:
        """Run commands of tc(8), all in one batch."""
        subprocess.run(["tc", "-n", self.name, "-batch", "-"], input="\n".join(lines).encode(), check=True)

    def lacks(self, line: str) -> bool:
        """Run a command of ip(8). True if the kernel does not support it."""
        command = ["ip", "-n", self.name, *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "Unknown device type" in done.stderr or "not supported" in done.stderr:
            return True
        assert done.returncode == 0, done.stderr
        return False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, the calling thread is in the namespace."""
        with netns.entered(netns.path(self.name)):
            yield


@contextlib.contextmanager
def namespace(name: str) -> Iterator[Namespace]:
    """Create a namespace, with loopback down as by default, and remove it afterwards."""
    full = f"ebpfproxy-test-{os.getpid()}-{name}"
    netns.create(full)
    try:
        yield Namespace(full)
    finally:
        with contextlib.suppress(NotFound):
            netns.delete(full)
