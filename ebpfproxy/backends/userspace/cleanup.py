"""Removes what mode userspace left: the local routes of the addresses of Services, and redirects."""

from ebpfproxy.backends.userspace import redirects
from ebpfproxy.linux.netlink import local_routes
from ebpfproxy.model.address import format_address


def remove(dry_run: bool = False) -> list[str]:
    """Remove the routes and the redirects, in the calling thread's network namespace. Return one line for
    each kind that exists.

    Raises KernelError.
    """
    found = local_routes.read()
    if not found:
        return redirects.remove(dry_run)
    if not dry_run:
        for failure in local_routes.change((), found).values():
            raise failure
    routes = f"local routes to addresses of Services: {len(found)}, such as {format_address(min(found))}"
    return [routes, *redirects.remove(dry_run)]
