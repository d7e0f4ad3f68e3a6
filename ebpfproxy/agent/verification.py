"""The verification between changes: it compares the kernel with what the agent wrote, a few milliseconds at a
time, so that no change waits for it.
"""

import time
from collections.abc import Callable, Iterator

from ebpfproxy.errors import KernelError
from ebpfproxy.log import Logger

log = Logger(__name__)

CHECK_FAILED = "Cannot compare the kernel with the plan"
"""The next sync reads everything back instead."""

_SLICE = 0.003
"""Seconds after which a slice starts no further step. Most steps take about 1 ms."""


class Verification:
    """One check at a time, in slices."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: Iterator[bool] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a check has begun and not ended."""
        return self._steps is not None

    def start(self, steps: Iterator[bool]) -> None:
        """Begin a check with the steps of `Backend.check`."""
        self._steps = steps

    def cancel(self) -> None:
        """End the check: everything was read, or the mode has changed."""
        self._steps = None

    def run_slice(self) -> bool | None:
        """Run some steps. Return whether the check found no difference, None if it has not ended yet.

        A failed check counts as a difference. True if no check is running.
        """
        end = self._clock() + _SLICE
        try:
            for is_right in self._steps or ():
                if not is_right:
                    self._steps = None
                    return False
                if self._clock() >= end:
                    return None
        except KernelError as failure:
            log.warning(CHECK_FAILED, reason=failure.message, hint=failure.hint)
            self._steps = None
            return False
        self._steps = None
        return True
