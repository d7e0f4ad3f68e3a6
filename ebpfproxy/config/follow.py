"""Follow changes of the configuration file.

The file is polled every second, which costs little. inotify would miss changes behind symbolic links, as the
kubelet uses for ConfigMap volumes (kubernetes/kubernetes#94022). It would also take one of the node's few
inotify instances.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from ebpfproxy.config.document import read
from ebpfproxy.errors import ConfigError
from ebpfproxy.log import Logger

log = Logger(__name__)

KEEPING = "Cannot read the configuration file, keeping the last one"
"""Retried at the next change."""

_PERIOD = 1.0


def follow(
    path: Path,
    stop: threading.Event,
    changed: Callable[[], object],
    known: bytes | None = None,
    period: float = _PERIOD,
) -> None:
    """Call `changed` after each change of the content of `path`, until `stop` is set.

    Run it in a thread of its own. `known` is the content in effect (`Loaded.content`); the default is the
    content at the first read. A change is reported once two reads, `period` seconds apart, return the same,
    because a file that is written in place is empty or truncated for a moment. A file that is missing or
    unreadable is not a change; this function waits for it.
    """
    last, failed = known, False
    while True:
        try:
            content = read(path)
        except ConfigError as error:
            if not failed:
                log.warning(KEEPING, reason=error.message)
            failed = True
        else:
            failed = False
            known = content if known is None else known
            if content == last != known:
                known = content
                changed()
            last = content
        if stop.wait(period):
            return
