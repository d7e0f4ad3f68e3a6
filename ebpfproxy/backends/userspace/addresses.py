"""The addresses of Services that the node must treat as local, so that sockets can receive at them.

Each has a local route (see `linux/netlink/local_routes.py`), also if a device of the node has the same
address: the node's own route stays when the agent removes its route.
"""

from collections.abc import Collection

from ebpfproxy.backends.userspace import redirects
from ebpfproxy.backends.userspace.entries import Entry, Key, Local
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import local_routes
from ebpfproxy.model.address import family, format_address


def read() -> dict[Key, Entry]:
    """Return an entry for each address. Raises KernelError."""
    return {Local(family(address), address): True for address in local_routes.read()}


def change(puts: Collection[Local], drops: Collection[Local]) -> dict[Key, KernelError]:
    """Make addresses local, or no longer local; return those that the kernel rejects. Raises KernelError."""
    if not puts and not drops:
        return {}
    failed = local_routes.change({key.address for key in puts}, {key.address for key in drops})
    return {key: failed[key.address] for key in (*puts, *drops) if key.address in failed}


def remove(dry_run: bool = False) -> list[str]:
    """Remove what the mode left in the calling thread's network namespace, the routes and the redirects.

    Return one line for each kind that exists. Raises KernelError.
    """
    found = local_routes.read()
    if not found:
        return redirects.remove(dry_run)
    if not dry_run:
        for failure in local_routes.change((), found).values():
            raise failure
    routes = f"local routes to addresses of Services: {len(found)}, such as {format_address(min(found))}"
    return [routes, *redirects.remove(dry_run)]
