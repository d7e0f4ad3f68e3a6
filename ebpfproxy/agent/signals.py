"""Signals of the process: one thread receives them, so that none is lost and none interrupts a system call.

The signals are blocked in every other thread, and before the thread runs. A signal that arrives earlier stays
pending in the kernel until the thread takes it. Pending signals also survive execve(2) (signal(7)), so a
restart loses none.
"""

import contextlib
import signal
import threading
from collections.abc import Callable

from ebpfproxy.agent.inbox import Drain, Inbox, Reload, Stop

HANDLED = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})


def block() -> None:
    """Block the handled signals in this thread, and in the threads and programs that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


class Signals:
    """Puts signals into the inbox as Stop and Reload. `ending` is called at SIGTERM and SIGINT.

    With `drains`, the first SIGTERM or SIGINT becomes Drain, and `ending` is not called.
    """

    def __init__(self, inbox: Inbox, ending: Callable[[], object], *, drains: bool = False) -> None:
        self._inbox = inbox
        self._drains = drains
        self._ending = ending
        self._stopping = False
        self.has_stop = False
        """Whether a signal has asked the agent to end."""
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)

    def start(self) -> None:
        """Call it in the main thread, before others are started: they must inherit the blocked signals."""
        block()
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Later signals stay pending."""
        self._stopping = True
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(self._thread.ident or 0, signal.SIGHUP)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            number = signal.sigwait(HANDLED)
            if number != signal.SIGHUP and self._drains and not self.has_stop:
                self.has_stop = True
                self._inbox.put(Drain(signal.Signals(number).name))
            elif number != signal.SIGHUP:
                self.has_stop = True
                self._ending()
                self._inbox.put(Stop(signal.Signals(number).name))
            elif not self._stopping:
                self._inbox.put(Reload("SIGHUP"))
