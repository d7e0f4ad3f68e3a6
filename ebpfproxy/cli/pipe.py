"""The end of a command whose output is a pipe that nothing reads any more, for example that of ``head``."""

import os
import select
import sys
from io import UnsupportedOperation


def is_closed() -> bool:
    """Whether standard output is a pipe or socket without a reader."""
    try:
        number = sys.stdout.fileno()
    except (UnsupportedOperation, ValueError):  # a test or another command reads the output
        return False
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def discard_output() -> None:
    """Let all later output disappear: Python flushes its buffer at its end, and would report an error."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
