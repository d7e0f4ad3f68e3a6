"""The end of threads: waits in limited time, and names the threads that still run."""

import threading

from ebpfproxy.log import Logger

log = Logger(__name__)

NOT_ENDED = "A thread did not end in time, continuing without it"
"""`thread` is its name. It ends with the process. What it uses, such as maps, stays open until then."""


def join(thread: threading.Thread, seconds: float) -> bool:
    """Wait at most `seconds` for the end of a thread, and return whether it ended. If not, log a warning."""
    thread.join(seconds)
    if thread.is_alive():
        log.warning(NOT_ENDED, thread=thread.name, after_s=seconds)
    return not thread.is_alive()
