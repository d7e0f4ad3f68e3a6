"""The end of the process in limited time, whatever a thread or a system call waits for.

The kubelet sends SIGKILL after terminationGracePeriodSeconds, without a line in the log. So the agent ends
earlier by itself, and names what did not end. Nothing is lost: the kernel forwards without the agent, and the
next start takes over what it finds.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ebpfproxy.log import Logger

log = Logger(__name__)

NOT_ENDED = "Ending without the parts that did not end in time"
"""`part` is the part that was being ended, `threads` the threads that still run. The kernel continues to
forward, except in mode userspace."""

SECONDS = 8.0
"""The longest time from the signal to the end of the process: shorter than the grace period in deploy/."""

_FIRST_PART = "start"
_OWN = ("ending", "signals")


class Ending:
    """Limits the time from `begin` to the end of the process. `expired` is called when it is over.

    `restarts` is set if the process is to be replaced instead of ended.
    """

    def __init__(self, expired: Callable[[], object], seconds: float = SECONDS) -> None:
        self._expired = expired
        self._seconds = seconds
        self._part = _FIRST_PART
        self._lock = threading.Lock()
        self._began = False
        self.restarts = False

    def begin(self) -> None:
        """Start the time, if it was not started before. Any thread may call it."""
        with self._lock:
            if self._began:
                return
            self._began = True
        threading.Thread(target=self._wait, name="ending", daemon=True).start()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Name the part that ends in this block."""
        self._part = name
        yield

    def _wait(self) -> None:
        time.sleep(self._seconds)
        threads = sorted(each.name for each in threading.enumerate() if each.name not in _OWN)
        log.warning(NOT_ENDED, part=self._part, threads=",".join(threads), after_s=self._seconds)
        self._expired()
