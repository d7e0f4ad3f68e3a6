"""The limit of open files of this process."""

import contextlib
import resource

_MOST = 1 << 20


def limit() -> int:
    """How many files this process may have open (RLIMIT_NOFILE)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> None:
    """Raise it to 1,048,576, or as far as it is permitted, as Go programs do at their start.

    systemd and container runtimes start services with 1,024, for programs that use select(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (max(hard, _MOST), hard):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            return
