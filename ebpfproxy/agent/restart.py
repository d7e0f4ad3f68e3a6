"""Restart: the process replaces itself by a new run of its command (execve(2)).

The process and its PID remain, so neither the kubelet nor systemd counts a restart or delays it. The kernel
continues to forward meanwhile. See docs/decisions/0029.
"""

import os
import sys

from ebpfproxy.agent import signals
from ebpfproxy.config import handover
from ebpfproxy.config.handover import Handover
from ebpfproxy.log import Logger

log = Logger(__name__)

NOT_REPLACED = "Cannot restart, ending instead"
"""The process could not be replaced. Its supervisor starts it again."""

_FAILED = 1


def replace(content: Handover | None) -> None:
    """Run this process's command in its place. Returns never; ends the process if that fails.

    `content` is for the new run. Any thread may call it: the other threads end.
    """
    signals.block()  # a signal that arrives meanwhile is for the new run
    try:
        if content:
            handover.give(content)
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError as failure:
        log.error(NOT_REPLACED, reason=failure.strerror or str(failure))
        os._exit(_FAILED)
