"""Mode cleanup: the thread that removes what other modes and kube-proxy left in the kernel."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

from ebpfproxy import threads
from ebpfproxy.backends.interface import Mode
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family

log = Logger(__name__)

REMOVED = "Removed objects of another mode"
"""After a start or a mode switch. Rules of kube-proxy count as objects of a mode."""
NOT_REMOVED = "Failed to remove objects of another mode, retrying"
"""Retried every 10 s."""

ALONE = "No objects of other modes are left"
"""The node has only objects of the current mode and of the kubelet."""

_INTERVAL = 10.0  # seconds between two attempts while objects wait for connections to end


class ModeCleanup:
    """Removes the objects of modes that are passed to `drain`, until none are left or the mode is used again.

    `drained` is called in the thread, with the name of a mode and the number of removed objects.
    """

    def __init__(
        self, config: Config, drained: Callable[[str, int], object] = lambda name, count: None
    ) -> None:
        self._config = config  # as of the last `drain`
        self._drained = drained
        self._waiting: dict[str, Mode] = {}
        self._reported: dict[str, str] = {}
        self._translates: Callable[[Family], bool] = _is_translating
        self._lock = threading.RLock()  # taken while a mode is drained or started
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="mode-cleanup", daemon=True)
        self._thread.start()

    def drain(self, modes: Collection[Mode], serving: Mode, config: Config) -> None:
        """Start to remove the objects of `modes`. `serving` is the current mode, with `config`."""
        with self._lock:
            self._config = config
            self._translates = _never if serving.uses_kernel_nat else _is_translating
            self._waiting.update({mode.name: mode for mode in modes})
        self._wake.set()

    @contextlib.contextmanager
    def pause_for(self, mode: Mode) -> Iterator[None]:
        """Cancel the cleanup of `mode`, which is about to start, and pause all cleanup within the block.

        Modes may share chains, so nothing is removed while `mode` starts and the previous one ends. If an
        attempt is in progress, this waits for its end.
        """
        with self._lock:
            self._waiting.pop(mode.name, None)
            yield

    def close(self) -> None:
        """End the thread. The next run of the agent removes what remains."""
        self._stop = True
        self._wake.set()
        threads.join(self._thread, _INTERVAL)

    def _run(self) -> None:
        while not self._stop:
            for name in list(self._waiting):
                with self._lock:
                    mode = self._waiting.get(name)
                    if mode and not self._stop and not self._drain(mode):
                        self._waiting.pop(name)
                        if not self._waiting:
                            log.info(ALONE)
            self._wake.wait(_INTERVAL if self._waiting else None)
            self._wake.clear()

    def _drain(self, mode: Mode) -> bool:
        """Remove what can be removed now. Return whether objects of the mode are left."""
        try:
            removed, is_left = mode.drain(self._config, self._translates)
        except KernelError as failure:
            self._report(mode, failure.message, failure.hint)
            return True
        except Exception as failure:  # the thread must continue to retry
            self._report(mode, repr(failure))
            return True
        if removed:
            log.info(REMOVED, mode=mode.name, items=len(removed), first=removed[0])
            self._drained(mode.name, len(removed))
        return is_left

    def _report(self, mode: Mode, reason: str, hint: str = "") -> None:
        """Log each reason once, until it changes."""
        if self._reported.get(mode.name) != reason:
            log.warning(NOT_REMOVED, mode=mode.name, reason=reason, hint=hint)
            self._reported[mode.name] = reason


def _is_translating(ip_family: Family) -> bool:
    """Return whether the kernel translates any flow of this family. Raises Rejected.

    True if the kernel cannot report it: the objects then stay a little longer.
    """
    try:
        return conntrack.nat_in_use(ip_family)
    except Unsupported:
        return True


def _never(ip_family: Family) -> bool:
    """Return False: the current mode uses the kernel's NAT, too, so no flow needs the previous mode."""
    return False
