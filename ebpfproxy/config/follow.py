"""Whether the configuration file is another one than it was.

It is looked at, not watched: a second is soon enough, a look costs next to nothing, and it sees what inotify
on a file does not, such as the links by which the kubelet swaps a ConfigMap's volume
(kubernetes/kubernetes#94022); nor does it take one of the node's few inotify instances.
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
    """Call `changed` each time that the content of `path` has become another, until `stop` is set.

    For a thread of its own. `known` is the content that is in force (`Loaded.content`); without it, what is
    there at the first look. A change is reported when a second look, `period` seconds after the first, finds
    the same, since a file that is written in place is empty and then cut short for a moment. A file that is
    gone, or cannot be read, is no change; it is waited for.
    """
    new, missed = known, False
    while True:
        try:
            seen = read(path)
        except ConfigError as error:
            if not missed:
                log.warning(KEEPING, reason=error.message)
            missed = True
        else:
            missed = False
            known = seen if known is None else known
            if seen == new != known:
                known = seen
                changed()
            new = seen
        if stop.wait(period):
            return
