"""The end of a command whose output is a pipe that nothing reads any more, for example that of ``head``."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

CLOSED = 141
"""The exit code of such a command: that of a process that SIGPIPE ends, as a shell shows it."""


def ends_with_its_pipe(function: F) -> F:
    """Let the command end without an error if its output is closed."""

    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        try:
            result = function(*given, **named)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # Python flushes standard output when it ends, and would report another error.
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())
            os.close(nothing)
            return CLOSED

    return cast(F, run)
