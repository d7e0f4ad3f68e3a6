"""Watches where programs of this node listen, for `plan.protected_addresses`.

Relays listen at frontends of Services. They do not count, also if another process than the agent, such as
`explain`, reads the sockets.
"""

import threading
from collections.abc import Callable

from ebpfproxy.errors import KernelError
from ebpfproxy.linux import processes
from ebpfproxy.linux.sockets import holders, listening
from ebpfproxy.log import Logger
from ebpfproxy.model.cluster import Listening

log = Logger(__name__)

NOT_LISTED = "Cannot list the listening sockets, retrying"
"""External and load balancer IPs that are addresses of this node are served, whatever listens there. Logged
once."""

INTERVAL = 10.0
"""Seconds between two reads."""


def watch(changed: Callable[[Listening], object], stop: threading.Event, interval: float = INTERVAL) -> None:
    """Report where programs listen at once, and again after each change, until `stop` is set.

    A program that restarts is not replaced by a Service: what one read lacks is reported until the next one.
    """
    reported: Listening | None = None
    previous: Listening = {}
    known: frozenset[int] = frozenset()
    of_relays: frozenset[int] = frozenset()
    has_failed = False
    while True:
        try:
            found = listening.read()
        except KernelError as failure:
            if not has_failed:
                log.warning(NOT_LISTED, reason=failure.message, hint=failure.hint)
            has_failed, found = True, []
        inodes = frozenset(each.inode for each in found)
        if not inodes <= known:  # a walk over all processes takes longer than listing sockets
            of_relays = _of_relays()
        known = inodes
        current = listening.addresses(found, of_relays)
        both = {key: current.get(key, previous.get(key, frozenset())) for key in current.keys() | previous}
        if both != reported:
            reported = both
            changed(both)
        previous = current
        if stop.wait(interval):
            return


def _of_relays() -> frozenset[int]:
    """The inodes of all sockets of relays."""
    from ebpfproxy.backends.userspace import relay

    relays = [each.pid for each in processes.in_own_netns() if relay.__name__ in each.arguments]
    return frozenset(inode for pid in relays for inode in holders.sockets_of(pid))
