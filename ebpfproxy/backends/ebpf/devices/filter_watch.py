"""A thread that requests a check of the devices after their tc filters have changed.

The agent also checks the devices every few seconds. So a lost notification only delays the repair.
"""

import threading
from collections.abc import Callable

from ebpfproxy import threads
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import tc_watch
from ebpfproxy.linux.netlink.rtnetlink_watch import Stop
from ebpfproxy.log import Logger

log = Logger(__name__)

UNWATCHED = "Cannot watch tc filters"
"""Notifications cannot be received. Only the periodic check finds changes of filters."""

_PATIENCE = 5.0  # seconds that `close` waits for the thread


class FilterWatch:
    """Watches tc filters in a thread, in the network namespace of the thread that creates this object.

    The thread calls `is_watched` (with a device's ifindex) and `changed`.
    """

    def __init__(self, is_watched: Callable[[int], bool], changed: Callable[[], object]) -> None:
        self._is_watched = is_watched
        self._changed = changed
        self._stop = Stop()
        self._thread = threading.Thread(target=self._run, name="filter-watch", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """False after notifications could not be received."""
        return self._thread.is_alive()

    def close(self) -> None:
        self._stop.set()
        if threads.join(self._thread, _PATIENCE):
            self._stop.close()

    def _run(self) -> None:
        try:
            tc_watch.watch(self._is_watched, self._changed, self._stop)
        except KernelError as failure:
            log.warning(UNWATCHED, reason=failure.message, hint=failure.hint)
