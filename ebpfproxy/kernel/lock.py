"""A lock on a folder: flock(2) on the folder itself, so there is no file to leave behind, and it ends with
whoever holds it, however that ends."""

import fcntl
import os
import time
from pathlib import Path

from ebpfproxy.errors import AlreadyExists, NotFound, Rejected

_POLL_SECONDS = 0.05


class FolderLock:
    """Held from its making until `release`. A child process that is given `fd` holds it, too."""

    def __init__(self, folder: Path, patience: float = 0.0) -> None:
        """Raises AlreadyExists where another holds it for `patience` seconds more, NotFound without it."""
        try:
            self.fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{folder} does not exist") from None
        except OSError as failure:
            raise Rejected(f"cannot lock {folder}: {failure.strerror}", "run as root") from failure
        deadline = time.monotonic() + patience
        while not self._taken():
            if time.monotonic() >= deadline:
                os.close(self.fd)
                raise AlreadyExists(f"another ebpfproxy holds {folder}")
            time.sleep(_POLL_SECONDS)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
