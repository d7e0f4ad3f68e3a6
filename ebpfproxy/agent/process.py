"""The process of the agent: signals and HTTP servers first, then the agent, and its end in limited time.

The parts of the agent take most of the time of a start to import and to open. So they come after the servers:
probes are answered from the first moments of the process.
"""

import os
import queue
from collections.abc import Callable

from ebpfproxy.agent import restart
from ebpfproxy.agent.ending import Ending
from ebpfproxy.agent.front import Front
from ebpfproxy.agent.inbox import Inbox
from ebpfproxy.agent.signals import Signals
from ebpfproxy.config import Loaded
from ebpfproxy.config.handover import Handover
from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.linux import descriptors
from ebpfproxy.log import Logger
from ebpfproxy.plan.service_plan import Role

log = Logger(__name__)

START_FAILED = "Cannot start with the changed configuration, returning to the previous one"
"""The configuration file is valid, but the agent cannot work with it. It is tried again when it changes."""


def run(loaded: Loaded, reread: Callable[[], Loaded]) -> None:
    """Run the agent until SIGTERM or SIGINT; the kernel continues to forward. Raises EbpfProxyError.

    `reread` returns the current configuration. It is called at SIGHUP and when the file has changed. Call
    `run` in the main thread. It does not return if the agent restarts.
    """
    descriptors.raise_limit()
    inbox: Inbox = queue.SimpleQueue()
    next_run = None if loaded.content is None else Handover(loaded.content)
    ending = Ending(lambda: _end(signals, ending, next_run))
    config = loaded.config
    drains = config.role is Role.EDGE and config.edge_drain_seconds > 0
    signals = Signals(inbox, ending.begin, drains=drains)
    signals.start()
    front = Front(loaded)
    try:
        front.start()
        from ebpfproxy.agent import daemon  # not at the top: see the module's docstring

        daemon.run(loaded, reread, inbox, front, ending)
    except EbpfProxyError as failure:
        if loaded.previous is None or loaded.content is None or front.health.has_synced:
            raise
        log.error(START_FAILED, reason=failure.message, hint=failure.hint)
        ending.restarts, next_run = True, Handover(loaded.previous, rejected=loaded.content)
    ending.begin()
    if ending.restarts:
        signals.stop()
        _end(signals, ending, next_run)


def _end(signals: Signals, ending: Ending, next_run: Handover | None) -> None:
    """Replace the process if the agent restarts and no signal asks it to end; else end it at once."""
    if ending.restarts and not signals.has_stop:
        restart.replace(next_run)
    os._exit(0)
