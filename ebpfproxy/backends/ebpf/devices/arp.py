"""ARP on the uplinks: selects the node address that ARP requests have as their sender.

The classifiers masquerade at egress, after the kernel has looked up the next hop's link-layer address. If
that address is unknown, the kernel requests it with the packet's source as sender (arp_solicit() in
net/ipv4/arp.c). For a process that is bound to a load balancer address, the node would announce that address.
A next hop without a route to it on this link does not reply.
"""

from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux import sysctl
from ebpfproxy.log import Logger

log = Logger(__name__)

BEST_LOCAL_ADDRESS = 2
"""The value of arp_announce (Documentation/networking/ip-sysctl.rst): the sender is an address of the
device."""

NOT_SET = "Cannot set sysctl"
"""Host-originated connections from a load balancer address may fail until the next hop is resolved."""


def announce_own_addresses(device: str) -> None:
    """Set arp_announce of the device in the calling thread's network namespace.

    Raises nothing. A missing device is ignored, and any other failure is logged.
    """
    name = f"net/ipv4/conf/{device}/arp_announce"
    try:
        sysctl.ensure_at_least(name, BEST_LOCAL_ADDRESS)
    except NotFound:
        return
    except KernelError as failure:
        log.warning(NOT_SET, name=name, value=BEST_LOCAL_ADDRESS, reason=failure.message, hint=failure.hint)
