"""The thread that reconnects connected UDP sockets after their endpoint is removed, in all network
namespaces.

It searches stale sockets after an endpoint was removed or a Service got its first one: at once after a quiet
period. While changes continue, it pauses after each search, so that searches use at most 5 % of a CPU. The
last change is always followed by a search. It repeats the search while there are sockets that it could not
reconnect. The packet path translates those of pods
(translation.py). With `destroy` the thread destroys the others: their process gets an error and must connect
again. Otherwise they continue to send to the removed endpoint, and the thread logs them.
"""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ebpfproxy import threads
from ebpfproxy.backends.ebpf.sockets import reconnect
from ebpfproxy.backends.ebpf.sockets.peers import SocketPeers, StalePeer
from ebpfproxy.backends.ebpf.sockets.translation import StaleTranslation
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.log import Logger
from ebpfproxy.model.address import format_endpoint
from ebpfproxy.model.counters import SocketCounts

log = Logger(__name__)

NOT_DESTROYED = "Failed to destroy stale UDP socket"
"""One socket; `Destroyed stale UDP sockets` counts them."""

RECONNECTED = "Reconnected UDP sockets"
"""Their endpoint is gone, or their frontend has its first one. Their processes get no error."""
NOT_RECONNECTED = "Failed to reconnect UDP sockets"
"""They continue to send to the endpoint that is gone. One line for each frontend and reason."""
TRANSLATED = "Translating packets of stale UDP sockets"
"""They could not be reconnected, so the packet path translates their packets to another endpoint."""
DESTROYED = "Destroyed stale UDP sockets"
"""With --ebpf-stale-udp=destroy: those that could not be reconnected."""
SEARCH_FAILED = "Failed to search stale UDP sockets, retrying"
"""The search ended before it was complete."""

_PASSES = 3  # in one search, since endpoints change meanwhile
_PATIENCE = 5.0  # seconds that `close` waits for the search
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0  # seconds
_POLL = 1.0  # seconds between checks for translated sockets that were closed
_BUSY_FACTOR = 20.0  # a pause is as many times as long as the CPU time of the search before it
_LONGEST_PAUSE = 5.0  # seconds
_LINES = 10  # the maximum number of NOT_RECONNECTED lines for one search


class StaleSockets:
    """Searches in a thread, because the search enters namespaces and must not delay a sync.

    The thread calls `counted` after each search that found stale sockets, and after the first one that finds
    none again.
    """

    def __init__(
        self,
        maps: Path,
        proc_root: Path,
        destroy: bool,
        counted: Callable[[SocketCounts], object],
        translation: StaleTranslation,
    ) -> None:
        """`translation` is closed with this object. Raises NotFound."""
        self._peers = SocketPeers(maps)
        self._translation = translation
        self._proc_root = str(proc_root)
        self._destroy = destroy
        self._counted = counted
        self._counts = SocketCounts()
        self._reported: Mapping[tuple[str, str], int] = {}
        self._retry = 0.0  # seconds; 0: no stale socket remains
        self._pause_end = float("-inf")  # the time before which no requested search begins
        self._jobs: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stale-sockets", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Request a search in the thread. One search is made for all calls before its start."""
        self._jobs.put(True)

    def close(self) -> None:
        """Finish the requested search, and end. It waits at most 5 s."""
        self._jobs.put(False)
        if not threads.join(self._thread, _PATIENCE):
            return  # it reads the maps: they stay open until the process ends
        self._translation.close()
        self._peers.close()

    def _run(self) -> None:
        running = True
        while running:
            requested, running = self._await()
            if requested:
                self._search_safely()

    def _await(self) -> tuple[bool, bool]:
        """Wait until a search is due. Return whether to search, and whether to continue after that."""
        requested = False
        due = max(time.monotonic() + self._retry, self._pause_end) if self._retry else None
        while True:
            timeout = None if due is None else max(0.0, min(due - time.monotonic(), _POLL))
            try:
                is_request = self._jobs.get(timeout=timeout)
            except queue.Empty:
                if due is not None and time.monotonic() >= due:
                    return True, True
                self._forget_safely()
                continue
            if not is_request:
                return requested, False
            if not requested:
                requested, due = True, self._pause_end

    def _search_safely(self) -> None:
        """Search; log every error. The thread must continue, since nothing else finds stale sockets."""
        began = time.thread_time()
        try:
            self._search()
        except KernelError as failure:
            self._failed(failure.message)
        except Exception as failure:
            self._failed(repr(failure))
        pause = min(_BUSY_FACTOR * (time.thread_time() - began), _LONGEST_PAUSE)
        self._pause_end = time.monotonic() + pause

    def _forget_safely(self) -> None:
        """Remove the entries of closed sockets; log every error."""
        try:
            if not self._translation.is_empty:
                self._translation.forget(self._peers)
        except Exception as failure:
            self._failed(failure.message if isinstance(failure, KernelError) else repr(failure))

    def _failed(self, reason: str) -> None:
        self._retry = min(2 * self._retry or _FIRST_RETRY, _LAST_RETRY)
        log.error(SEARCH_FAILED, reason=reason)

    def _search(self) -> None:
        """Make passes until no socket is stale, or a pass reconnects none."""
        started = time.monotonic()
        done: set[int] = set()
        stale = self._peers.stale()
        outcome = reconnect.Outcome()
        for _ in range(_PASSES):
            if not stale:
                break
            outcome = reconnect.reconnect(self._proc_root, self._peers, stale)
            done |= outcome.reconnected
            # If a reconnected socket still waits, the hook found no endpoint of its frontend for it.
            found = self._peers.stale().items()
            stale = {each: peer for each, peer in found if not (peer.waiting and each in done)}
            if not outcome.reconnected:
                break
        if done:
            log.info(RECONNECTED, sockets=len(done), seconds=round(time.monotonic() - started, 3))
        failed = {cookie: failure for cookie, failure in outcome.failed.items() if cookie in stale}
        self._retry = min(2 * self._retry or _FIRST_RETRY, _LAST_RETRY) if stale else 0.0
        self._give_up(len(done), stale, failed)

    def _give_up(
        self, reconnected: int, stale: Mapping[int, StalePeer], failed: Mapping[int, KernelError]
    ) -> None:
        """Translate the sockets that could not be reconnected. Log the others, and destroy them if
        configured.

        A socket whose pod's device will get programs is neither logged nor destroyed.
        """
        done, pending = self._translation.translate({each: stale[each] for each in failed})
        remaining = {cookie: failure for cookie, failure in failed.items() if cookie not in done}
        counts = SocketCounts(reconnected, left=len(remaining), translated=len(done))
        lost = {cookie: failure for cookie, failure in remaining.items() if cookie not in pending}
        if pending:
            self._retry = _FIRST_RETRY
        if counts.translated > self._counts.translated:
            reason = failed[min(done)]
            log.info(TRANSLATED, sockets=counts.translated, reason=reason.message, hint=reason.hint)
        self._report(stale, lost)
        if lost and self._destroy:
            destroyed, not_destroyed = self._destroy_all({each: stale[each] for each in lost})
            kept = len(remaining) - len(lost) + not_destroyed
            counts = counts._replace(destroyed=destroyed, not_destroyed=not_destroyed, left=kept)
        if any(counts) or self._counts.left or self._counts.translated:
            self._counted(counts)
        self._counts = counts

    def _report(self, stale: Mapping[int, StalePeer], failed: Mapping[int, KernelError]) -> None:
        """Log the failures by frontend and reason, unless they are the same as at the last call."""
        groups: collections.Counter[tuple[str, str]] = collections.Counter()
        hints: dict[tuple[str, str], tuple[str, str]] = {}
        for cookie, failure in failed.items():
            peer = stale[cookie]
            group = format_endpoint(*peer.frontend), failure.message
            groups[group] += 1
            hints.setdefault(group, (self._peers.service_name(peer.service), failure.hint))
        if groups == self._reported:
            return
        self._reported = groups
        for (frontend, reason), count in groups.most_common(_LINES):
            service, hint = hints[frontend, reason]
            log.warning(
                NOT_RECONNECTED, frontend=frontend, service=service, sockets=count, reason=reason, hint=hint
            )

    def _destroy_all(self, stale: Mapping[int, StalePeer]) -> tuple[int, int]:
        """Destroy all sockets. Return how many were destroyed, and how many could not be destroyed."""
        destroyed = failed = 0
        with contextlib.closing(reconnect.located_by_namespace(self._proc_root, stale)) as located:
            for _, found in located:
                for each in found:
                    outcome = _destroyed(each)
                    destroyed += outcome is True
                    failed += outcome is False
        log.info(DESTROYED, destroyed=destroyed, failed=failed)
        return destroyed, failed


def _destroyed(found: sockets.DiagSocket) -> bool | None:
    """Destroy a socket; return whether it was destroyed. None if its process has closed it meanwhile."""
    try:
        sockets.destroy(found)
    except NotFound:
        return None
    except KernelError as failure:
        peer = format_endpoint(found.destination, found.destination_port)
        log.debug(NOT_DESTROYED, peer=peer, reason=failure.message)
        return False
    return True
