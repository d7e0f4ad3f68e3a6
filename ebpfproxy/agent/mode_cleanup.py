"""The thread that takes away what other modes left on this node, kube-proxy's included."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

from ebpfproxy.backends.mode import Mode
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family

log = Logger(__name__)

REMOVED = "Removed objects of another mode"
"""After a start or a switch; kube-proxy's rules count as a mode's."""
NOT_REMOVED = "Failed to remove objects of another mode, retrying"
"""Retried every 10 s."""

ALONE = "No objects of other modes are left"
"""The node has only objects of the current mode, and of the kubelet."""

_STEP = 10.0  # seconds between two looks at what still waits for connections to end


class ModeCleanup:
    """A mode that is given to `drain` is worked on until nothing of it is left, or it is to serve again.

    `drained` is called in the thread, with a mode's name and how much of it was removed.
    """

    def __init__(
        self, config: Config, drained: Callable[[str, int], object] = lambda name, count: None
    ) -> None:
        self._config = config  # as of the last `drain`
        self._retired = drained
        self._waiting: dict[str, Mode] = {}
        self._reported: dict[str, str] = {}
        self._translates: Callable[[Family], bool] = _is_translating
        self._lock = threading.RLock()  # held while a mode is worked on, or begins
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="mode-cleanup", daemon=True)
        self._thread.start()

    def drain(self, modes: Collection[Mode], serving: Mode, config: Config) -> None:
        """Begin at once with these; `serving` is at work, by `config`."""
        with self._lock:
            self._config = config
            self._translates = _nobodys if serving.uses_kernel_nat else _is_translating
            self._waiting.update({mode.name: mode for mode in modes})
        self._wake.set()

    @contextlib.contextmanager
    def spare(self, mode: Mode) -> Iterator[None]:
        """Stop the cleanup of `mode`, which is about to serve, and pause that of all modes within the block.

        Modes may share chains, so nothing is removed while `mode` starts and the previous one ends. Waits for
        a step that has begun.
        """
        with self._lock:
            self._waiting.pop(mode.name, None)
            yield

    def close(self) -> None:
        """What is not done is left to the next run."""
        self._stop = True
        self._wake.set()
        self._thread.join(_STEP)

    def _run(self) -> None:
        while not self._stop:
            for name in list(self._waiting):
                with self._lock:
                    mode = self._waiting.get(name)
                    if mode and not self._stop and not self._step(mode):
                        self._waiting.pop(name)
                        if not self._waiting:
                            log.info(ALONE)
            self._wake.wait(_STEP if self._waiting else None)
            self._wake.clear()

    def _step(self, mode: Mode) -> bool:
        """Whether something is left."""
        try:
            removed, left = mode.drain(self._config, self._translates)
        except KernelError as failure:
            self._report(mode, failure.message, failure.hint)
            return True
        except Exception as failure:  # the thread continues: only it tries again
            self._report(mode, repr(failure))
            return True
        if removed:
            log.info(REMOVED, mode=mode.name, items=len(removed), first=removed[0])
            self._retired(mode.name, len(removed))
        return left

    def _report(self, mode: Mode, reason: str, hint: str = "") -> None:
        """Each reason once, until there is another one."""
        if self._reported.get(mode.name) != reason:
            log.warning(NOT_REMOVED, mode=mode.name, reason=reason, hint=hint)
            self._reported[mode.name] = reason


def _is_translating(of: Family) -> bool:
    """Whether the kernel translates any flow. Also where it does not tell: to hold it to that costs little.

    Raises Rejected.
    """
    try:
        return conntrack.nat_in_use(of)
    except Unsupported:
        return True


def _nobodys(of: Family) -> bool:
    """Whatever the kernel translates, it does so for the mode that serves anyway."""
    return False
