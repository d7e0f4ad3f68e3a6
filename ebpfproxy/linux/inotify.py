"""Reports whether a process opens a file, through any path and in any mount namespace (inotify(7))."""

import ctypes
import os
from pathlib import Path

from ebpfproxy.errors import Rejected

_IN_OPEN = 0x20
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # IN_NONBLOCK, IN_CLOEXEC
_EVENTS = 1 << 16  # bytes per read(2)

_libc = ctypes.CDLL(None, use_errno=True)


class OpenedFile:
    """A watch on one file, until `close`.

    The watch is on the inode. If the file is removed and created again, opens of the new file are not
    reported.
    """

    def __init__(self, path: Path) -> None:
        """Watch `path`; create it if it is missing. Raises Rejected if it cannot be opened or watched."""
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as failure:
            raise Rejected(f"cannot open {path}: {failure.strerror}", "run as root") from failure
        self._fd = _libc.inotify_init1(_FLAGS)
        if self._fd < 0:
            raise _failure(path, ctypes.get_errno())
        if _libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_OPEN) < 0:
            number = ctypes.get_errno()
            self.close()
            raise _failure(path, number)

    def was_opened(self) -> bool:
        """Whether the file was opened since the last call.

        Also True if the kernel dropped events because its queue was full: it reports the overflow as an
        event.
        """
        opened = False
        try:
            while os.read(self._fd, _EVENTS):
                opened = True
        except BlockingIOError:
            pass
        return opened

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _failure(path: Path, number: int) -> Rejected:
    return Rejected(f"cannot watch {path}: {os.strerror(number)}", "raise fs.inotify.max_user_instances")
