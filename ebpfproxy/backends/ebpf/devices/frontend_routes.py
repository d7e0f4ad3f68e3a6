"""The routes of on-link frontends in mode ebpf: see `linux/netlink/on_link_routes.py`."""

import functools
from collections.abc import Collection, Mapping

from ebpfproxy.backends.ebpf import features
from ebpfproxy.backends.ebpf.hooks import SCHED_CLS
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.netlink import links, on_link_routes
from ebpfproxy.linux.netlink.on_link_routes import Path, Target
from ebpfproxy.plan.service_plan import NodePlan


def are_wanted(node: NodePlan | None) -> bool:
    """Whether there are routes, and the kernel has what they need."""
    return node is not None and bool(node.frontend_routes) and _are_supported()


@functools.cache
def _are_supported() -> bool:
    """Whether the egress program can send other packets to the machine that has the address."""
    return bpf.loads(SCHED_CLS, 0, features.REDIRECT_NEIGH.code)


class FrontendRoutes:
    """Reads and changes the routes. A route of a device that is down counts as present, because the kernel
    removed it and not another program.

    Without any of these routes, none are read again: the kernel walks all routes of a node to find them.
    """

    def __init__(self) -> None:
        self._put: dict[Target, Path] = {}
        self._has_read = False

    def read(self) -> dict[Target, Path]:
        """Raises KernelError."""
        if self._has_read and not self._put:
            return {}
        found = on_link_routes.read()
        if not self._has_read:
            self._put |= found  # those of a previous run
            self._has_read = True
        missing = {target: path for target, path in self._put.items() if target not in found}
        if missing:
            up = links.up()
            found |= {target: path for target, path in missing.items() if path.ifindex not in up}
        return found

    def put(self, routes: Mapping[Target, Path]) -> dict[Target, KernelError]:
        """Return what the kernel rejected. Raises KernelError."""
        rejected = on_link_routes.put(routes) if routes else {}
        self._put |= {target: path for target, path in routes.items() if target not in rejected}
        return rejected

    def drop(self, targets: Collection[Target]) -> dict[Target, KernelError]:
        """Return what the kernel rejected. Raises KernelError."""
        rejected = on_link_routes.remove(targets) if targets else {}
        for target in targets:
            if target not in rejected:
                self._put.pop(target, None)
        return rejected
