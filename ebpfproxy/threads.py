"""Threads that continue after a failure, and the end of threads in limited time."""

import threading
import time
from collections.abc import Callable

from ebpfproxy.log import Logger

log = Logger(__name__)

NOT_ENDED = "A thread did not end in time, continuing without it"
"""`thread` is its name. It ends with the process. What it uses, such as maps, stays open until then."""
FAILED = "A thread failed, starting it again"
"""An error in the agent. `thread` is its name."""

_PAUSE_SECONDS = 1.0


def start(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread that calls `run` until it returns. After an error it is logged and called again a
    second later."""
    thread = threading.Thread(target=_run, args=(name, run), name=name, daemon=True)
    thread.start()
    return thread


def _run(name: str, run: Callable[[], None]) -> None:
    while True:
        try:
            run()
        except Exception as error:
            log.error(FAILED, thread=name, error=repr(error))
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def join(thread: threading.Thread, seconds: float) -> bool:
    """Wait at most `seconds` for the end of a thread, and return whether it ended. If not, log a warning."""
    thread.join(seconds)
    if thread.is_alive():
        log.warning(NOT_ENDED, thread=thread.name, after_s=seconds)
    return not thread.is_alive()
