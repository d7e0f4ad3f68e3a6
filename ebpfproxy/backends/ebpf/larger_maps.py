"""Prepares larger maps and programs that use them, while the present ones are in use."""

import threading
from collections.abc import Callable

from ebpfproxy import threads
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.ebpf.programs import Programs
from ebpfproxy.errors import KernelError, Rejected

_PATIENCE = 10.0  # seconds; loading takes 1 to 2 s


class LargerMaps:
    """Loads programs in a thread: the verifier takes a second or more, for which no change should wait."""

    def __init__(self, sizes: MapSizes, load: Callable[[], Programs], ended: Callable[[], object]) -> None:
        """`load` raises KernelError. `ended` is called in the thread, after a failure, too."""
        self.sizes = sizes
        self._programs: Programs | None = None
        self._failure: KernelError | None = None
        self._load = load
        self._ended = ended
        self._done = threading.Event()
        self._thread = threads.start("larger-maps", self._run)

    def _run(self) -> None:
        try:
            self._programs = self._load()
        except KernelError as failure:
            self._failure = failure
        except Exception as failure:  # changes wait for the end of this thread
            self._failure = Rejected(f"cannot prepare larger maps: {failure}")
        self._done.set()
        self._ended()

    @property
    def is_ready(self) -> bool:
        """Whether `load` has ended."""
        return self._done.is_set()

    def take(self) -> Programs:
        """The loaded programs, which the caller closes. Only if `is_ready`. Raises the KernelError of
        `load`."""
        if self._failure:
            raise self._failure
        assert self._programs
        return self._programs

    def close(self) -> None:
        """Wait until the thread ends, and close the programs."""
        if threads.join(self._thread, _PATIENCE) and self._programs:
            self._programs.close()
