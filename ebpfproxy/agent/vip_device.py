"""The device with the addresses of an edge: a routing daemon announces connected addresses."""

from collections.abc import Iterable, Set

from ebpfproxy.linux.netlink import dummy
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, format_address

log = Logger(__name__)

ANNOUNCED = "Announced addresses"
"""The addresses were added to the device `ebpfproxy-vip`: at least one endpoint is usable."""
WITHDRAWN = "Withdrew addresses"
"""The addresses were removed from the device `ebpfproxy-vip`: no endpoint is usable, the Service is gone, or
the edge drains."""

_SHOWN = 5  # addresses in a log line


class VipDevice:
    """The device `dummy.VIPS`. It stays after the end of the agent, since the kernel continues to forward."""

    def apply(self, wanted: Set[Address]) -> int:
        """Create the device if it is missing, and let it have exactly these addresses.

        Return how many were added and removed. If the kernel rejects some, the others are changed
        nevertheless, and the first error is raised. Raises KernelError.
        """
        dummy.ensure(dummy.VIPS)
        dummy.set_up(dummy.VIPS)
        present = dummy.addresses(dummy.VIPS)
        added, removed = wanted - present, present - wanted
        rejected = dummy.change_addresses(dummy.VIPS, added, removed)
        added, removed = added - rejected.keys(), removed - rejected.keys()
        if added:
            log.info(ANNOUNCED, count=len(added), addresses=_shown(added))
        if removed:
            log.info(WITHDRAWN, count=len(removed), addresses=_shown(removed))
        if rejected:
            raise next(iter(rejected.values()))
        return len(added) + len(removed)


def _shown(addresses: Iterable[Address]) -> str:
    texts = list(map(format_address, sorted(addresses)))
    further = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + further
