"""Prepares larger maps and programs that use them, while the present ones are in use."""

import threading
from collections.abc import Callable

from ebpfproxy import threads
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.errors import KernelError, Rejected

_PATIENCE = 10.0  # seconds; loading takes 1 to 2 s


class LargerMaps:
    """Loads programs in a thread: the verifier takes a second or more, for which no change should wait."""

    def __init__(self, sizes: MapSizes, load: Callable[[], object], ended: Callable[[], object]) -> None:
        """`load` raises KernelError. `ended` is called in the thread, after a failure, too."""
        self.sizes = sizes
        self.failure: KernelError | None = None
        self._load = load
        self._ended = ended
        self._done = threading.Event()
        self._thread = threads.start("larger-maps", self._run)

    def _run(self) -> None:
        try:
            self._load()
        except KernelError as failure:
            self.failure = failure
        except Exception as failure:  # changes wait for the end of this thread
            self.failure = Rejected(f"cannot prepare larger maps: {failure}")
        self._done.set()
        self._ended()

    @property
    def is_ready(self) -> bool:
        """Whether `load` has ended, maybe with `failure`."""
        return self._done.is_set()

    def close(self) -> None:
        """Wait until the thread ends."""
        threads.join(self._thread, _PATIENCE)
