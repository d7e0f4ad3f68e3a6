"""Ends the grace period of released ranges and ids early, if the kernel offers a way to wait for it."""

import contextlib

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf.grace_period import GracePeriod


class Grace:
    """Waits for running programs. If the kernel cannot, released entries rest for the fixed time instead.

    That is no error: only a map that is almost full shows a difference, and `TableFull` reports it.
    """

    def __init__(self) -> None:
        self._period: GracePeriod | None = None
        with contextlib.suppress(KernelError):
            self._period = GracePeriod()

    def end(self) -> bool:
        """Wait until no program that is running now still runs, usually 5 to 30 ms. See `EndGrace`."""
        if self._period is None:
            return False
        try:
            self._period.wait()
        except KernelError:
            return False
        return True

    def close(self) -> None:
        if self._period:
            self._period.close()
            self._period = None
