"""The routes of on-link frontends in mode ebpf: see `linux/netlink/on_link_routes.py`."""

import functools
from collections.abc import Collection, Mapping

from ebpfproxy.backends.ebpf import features
from ebpfproxy.backends.ebpf.hooks import SCHED_CLS
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.netlink import links, on_link_routes
from ebpfproxy.linux.netlink.on_link_routes import Path, Target


@functools.cache
def are_supported() -> bool:
    """Whether the egress program can send other packets to the machine that has the address."""
    return bpf.loads(SCHED_CLS, 0, features.REDIRECT_NEIGH.code)


class FrontendRoutes:
    """Reads and changes the routes. A route of a device that is down counts as present, because the kernel
    removed it and not another program."""

    def __init__(self) -> None:
        self._put: dict[Target, Path] = {}

    def read(self) -> dict[Target, Path]:
        """Raises KernelError."""
        found = on_link_routes.read()
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
