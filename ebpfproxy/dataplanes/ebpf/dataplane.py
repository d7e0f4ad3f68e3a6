"""The eBPF dataplane: the five methods, over services, local networks and hooks."""

import contextlib
import dataclasses
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

from ebpfproxy.dataplanes.ebpf import abi, entries
from ebpfproxy.dataplanes.ebpf.carry_over import CarryOver
from ebpfproxy.dataplanes.ebpf.entries import (
    ATTACHED,
    Entry,
    HookKey,
    Key,
    ServicePortEntry,
    ServicePortKey,
)
from ebpfproxy.dataplanes.ebpf.maps import Maps, MapSizes
from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.dataplanes.ebpf.programs import Programs
from ebpfproxy.dataplanes.ebpf.service_table import ServiceTable
from ebpfproxy.dataplanes.ebpf.stale_sockets import StaleSockets
from ebpfproxy.dataplanes.interface import Delta
from ebpfproxy.errors import KernelError
from ebpfproxy.kernel import mounts, netns
from ebpfproxy.kernel.lock import FolderLock
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Network
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan

log = Logger(__name__)

_U32 = struct.Struct("=I")
_PATIENCE = 5.0  # seconds for an agent that is about to end, as at a DaemonSet's update


@dataclasses.dataclass(frozen=True, slots=True)
class EbpfSettings:
    """Where everything is. `cgroup_root` catches the sockets of all processes below it."""

    cgroup_root: Path
    bpffs_root: Path
    proc_root: Path = Path("/proc")
    sizes: MapSizes = dataclasses.field(default_factory=MapSizes)


def _nobody_counts(destroyed: int, failed: int) -> None:
    pass


class EbpfDataplane:
    """See `Dataplane` for the contract. The calling thread's network namespace counts as the node."""

    name = "ebpf"

    def __init__(
        self,
        settings: EbpfSettings,
        sockets_destroyed: Callable[[int, int], object] = _nobody_counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._sockets_destroyed = sockets_destroyed
        self._clock = clock

    def open(self) -> None:
        """Maps and programs are there afterwards; what is attached is still what was attached before.

        Raises AlreadyExists where another agent has this bpffs root: two would overwrite each other's
        slots and endpoints.
        """
        root = self._settings.bpffs_root
        if mounts.ensure_bpffs(root):
            _warn_of_private_mount(root, self._settings.proc_root)
        self._lock = FolderLock(root, _PATIENCE)
        self._pins = Pins(root)
        self._programs = Programs(
            self._pins, self._settings.cgroup_root, self._settings.sizes, (self._lock.fd,)
        )
        self._maps = Maps(self._programs.maps)
        self._table = ServiceTable(self._maps, self._clock)
        cookie = netns.cookie_or_initial(self._settings.proc_root)
        self._maps["node"].update(_U32.pack(0), abi.NODE.pack(cookie))
        self._stale = StaleSockets(self._programs.maps, self._settings.proc_root, self._sockets_destroyed)
        self._settled = False

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        return entries.render(plans, node, self._programs.hooks)

    def read(self) -> dict[Key, Entry]:
        """Where somebody removed our pins, everything is made anew first, and nothing is in force then."""
        if not self._programs.is_pinned():
            log.warning("pins were removed by somebody; loading anew", root=self._settings.bpffs_root)
            self.close()
            self.open()
        found: dict[Key, Entry] = dict(self._table.read().items())
        for key, value in self._maps["local_networks"].items():
            length, address = abi.NETWORK_KEY.unpack(key)
            found[Network(Address(address), length)] = int(_U32.unpack(value)[0])
        found.update({HookKey(name): ATTACHED for name in self._programs.attached()})
        return found

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """Networks, then services, then hooks: nothing is sent anywhere before the maps are complete."""
        refused: dict[Key, KernelError] = dict(self._put_networks(delta.puts).items())
        puts = {k: cast(ServicePortEntry, e) for k, e in delta.puts.items() if isinstance(k, ServicePortKey)}
        drops = [key for key in delta.drops if isinstance(key, ServicePortKey)]
        services, gone = self._table.apply(puts, drops)
        refused.update(services.items())
        hooks = [key.name for key in delta.puts if isinstance(key, HookKey)]
        refused.update({HookKey(name): error for name, error in self._attach(hooks).items()})
        for key in delta.drops:
            if isinstance(key, Network):
                self._maps["local_networks"].delete(_network_key(key))
        self._settle(any(isinstance(key, HookKey) for key in refused))
        if gone:
            self._stale.look(frozenset(gone))
        return refused

    def _put_networks(self, puts: Mapping[Key, Entry]) -> dict[Key, KernelError]:
        refused: dict[Key, KernelError] = {}
        for key, entry in puts.items():
            if isinstance(key, Network):
                try:
                    self._maps["local_networks"].update(_network_key(key), _U32.pack(cast(int, entry)))
                except KernelError as failure:
                    refused[key] = failure
        return refused

    def _attach(self, hooks: list[str]) -> Mapping[str, KernelError]:
        """Where another layout is hooked in, what its maps know of sockets and clients comes along."""
        former = self._former_maps() if hooks else None
        if former is None:
            return self._programs.attach(hooks)
        carrying = CarryOver(former, self._maps, self._table.ids_of)
        try:
            carrying.copy()
            failed = self._programs.attach(hooks)
            carrying.copy()  # of what was connected meanwhile
        finally:
            carrying.close()
        return failed

    def _former_maps(self) -> Path | None:
        """The maps of the layout that is hooked in; None where that is this one, or there is none."""
        try:
            layout = self._pins.hooked_in()
        except KernelError:
            return None
        return layout / "maps" if layout != self._programs.layout and layout.is_dir() else None

    def _settle(self, incomplete: bool) -> None:
        """After the first delta that left every hook attached: let go of what an earlier run left."""
        if self._settled or incomplete:
            return
        self._programs.settle()
        self._settled = True
        self._stale.look(None)  # what went while no agent ran

    def close(self) -> None:
        self._stale.close()
        self._table.close()
        self._maps.close()
        self._programs.close()
        self._lock.release()

    def usage(self) -> dict[str, tuple[int, int]]:
        """By map: entries in use, and room. For any thread."""
        return self._table.usage()


def _warn_of_private_mount(root: Path, proc_root: Path) -> None:
    """A bpffs that we had to mount, in a mount namespace that is not the host's, goes when that goes."""
    with contextlib.suppress(OSError):
        if Path("/proc/self/ns/mnt").stat().st_ino != (proc_root / "1/ns/mnt").stat().st_ino:
            log.warning(
                "the bpffs is this container's own: a restart will interrupt Services",
                root=root,
                hint="mount the host's /sys/fs/bpf into it, with mountPropagation Bidirectional",
            )


def _network_key(network: Network) -> bytes:
    return abi.NETWORK_KEY.pack(network.length, network.address)
