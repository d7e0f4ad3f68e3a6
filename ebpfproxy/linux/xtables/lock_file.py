"""The lock that tools of iptables-legacy hold while they change a table, for those that do not take it.

Before 1.4.20 that was an abstract address of unix(7), before 1.6.2 iptables-restore took none; kube-proxy
holds both of them around such a tool (grabIptablesLocks() in pkg/util/iptables/iptables_linux.go). Those of
the backend nft need none.
"""

import errno
import fcntl
import os
import socket
import time
import types
from pathlib import Path

from ebpfproxy.errors import Rejected

FILE = Path("/run/xtables.lock")

_ADDRESS = b"\0xtables"
_POLL_SECONDS = 0.1


class XtablesLock:
    """Held within the block. Entering raises Rejected where another has it for `patience` seconds more."""

    def __init__(self, patience: float, file: Path | None = None) -> None:
        self._patience = patience
        self._file = file or FILE

    def __enter__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as failure:
            self._socket.close()
            raise Rejected(f"cannot open {self._file}: {failure.strerror}", "run as root") from failure
        deadline = time.monotonic() + self._patience
        while not self._taken():
            if time.monotonic() >= deadline:
                self._release()
                raise Rejected(
                    f"another process holds {self._file}", "lslocks shows which one; it is tried again"
                )
            time.sleep(_POLL_SECONDS)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._release()

    def _taken(self) -> bool:
        """Both, the file first, which stays ours where only the address is another's."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._socket.getsockname():
                self._socket.bind(_ADDRESS)
        except OSError as failure:
            if failure.errno in (errno.EWOULDBLOCK, errno.EADDRINUSE):
                return False
            raise Rejected(f"cannot lock {self._file}: {failure.strerror}") from failure
        return True

    def _release(self) -> None:
        os.close(self._fd)
        self._socket.close()
