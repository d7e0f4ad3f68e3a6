"""Whether a program opens a file, as inotify(7) reports: by any path to it, in any mount namespace."""

import ctypes
import os
from pathlib import Path

from ebpfproxy.errors import Rejected

_IN_OPEN = 0x20
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # IN_NONBLOCK, IN_CLOEXEC
_EVENTS = 1 << 16  # bytes of events that are read at a time

_libc = ctypes.CDLL(None, use_errno=True)


class OpenedFile:
    """Until `close`. A file that is removed and made again is another one, which is not watched."""

    def __init__(self, path: Path) -> None:
        """The file is made where it is missing. Raises Rejected."""
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
        """Since this was asked last. What was lost, since there was too much at a time, was reported as
        well."""
        opened = False
        try:
            while os.read(self._fd, _EVENTS):
                opened = True
        except BlockingIOError:
            pass
        return opened

    def close(self) -> None:
        """May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _failure(path: Path, number: int) -> Rejected:
    return Rejected(f"cannot watch {path}: {os.strerror(number)}", "raise fs.inotify.max_user_instances")
