"""Removes what mode userspace left: the local routes of the addresses of Services."""

from ebpfproxy.linux.netlink import local_routes
from ebpfproxy.model.address import format_address


def remove(dry_run: bool = False) -> list[str]:
    """Remove the routes, in the calling thread's network namespace. Return one line if there are any.

    Raises KernelError.
    """
    found = local_routes.read()
    if not found:
        return []
    if not dry_run:
        for failure in local_routes.change((), found).values():
            raise failure
    return [f"local routes to addresses of Services: {len(found)}, such as {format_address(min(found))}"]
