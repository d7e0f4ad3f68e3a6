"""A thread that asks for a look at the devices when tc filters there have changed.

The look reads the kernel in any case, and is made every few seconds without it. So a notification that is
missing only delays the repair.
"""

import threading
from collections.abc import Callable

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import tc_watch
from ebpfproxy.linux.netlink.rtnetlink_watch import Stop
from ebpfproxy.log import Logger

log = Logger(__name__)

UNWATCHED = "Cannot watch tc filters"
"""Notifications cannot be received. Changes of filters are found by the periodic look alone."""

_PATIENCE = 5.0  # seconds that the agent's end waits for the thread


class FilterWatch:
    """The thread is in the network namespace of the thread that makes it.

    `is_watched` (of a device, by ifindex) and `changed` are called in it.
    """

    def __init__(self, is_watched: Callable[[int], bool], changed: Callable[[], object]) -> None:
        self._is_watched = is_watched
        self._changed = changed
        self._stop = Stop()
        self._thread = threading.Thread(target=self._run, name="filter-watch", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """False once notifications could not be received."""
        return self._thread.is_alive()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE)
        if not self._thread.is_alive():
            self._stop.close()

    def _run(self) -> None:
        try:
            tc_watch.watch(self._is_watched, self._changed, self._stop)
        except KernelError as failure:
            log.warning(UNWATCHED, reason=failure.message, hint=failure.hint)
