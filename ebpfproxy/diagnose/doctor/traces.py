"""What other programs and agents have left on this node: read from the kernel, from files and from proc.

Pinned maps and programs of others are not read. They stay after a plugin is uninstalled; devices, rules and
attached programs show what is in force.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from ebpfproxy.backends.iptables import entries, probes
from ebpfproxy.backends.selection import MODES
from ebpfproxy.config import Config
from ebpfproxy.config.derived import EBPF, USERSPACE
from ebpfproxy.diagnose.doctor import cni_files
from ebpfproxy.diagnose.doctor.cni_files import CniFile
from ebpfproxy.errors import EbpfProxyError, NotFound
from ebpfproxy.linux import mounts, processes
from ebpfproxy.linux.bpf import cgroup, tc, tcx
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netlink import links
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.processes import Process
from ebpfproxy.linux.sockets import sockets

T = TypeVar("T")

CGROUP = "cgroup"
"""The place of programs at the root of cgroup v2."""

CGROUP_PROGRAMS, DEVICE_PROGRAMS = "programs of the cgroup", "programs of network devices"
"""Keys of `Traces.unread`."""

_UNSHARED = (EBPF, USERSPACE)
"""The modes whose objects have other names than those of kube-proxy."""

_CONNECT = (10, 11)  # BPF_CGROUP_INET4_CONNECT, BPF_CGROUP_INET6_CONNECT


class AttachedProgram(NamedTuple):
    """`name`: as the kernel keeps it, up to 15 characters, or that of its tc filter. `place`: the name of a
    device, or CGROUP."""

    name: str
    place: str


class Traces(NamedTuple):
    """The state of the node.

    - `chains`: rules by chain, of all tables of iptables, both backends and both families.
    - `tables`: names of tables of nftables.
    - `processes`: those in the network namespace of this process.
    - `ports`: those at which a TCP server listens, at any address.
    - `own`: what agents have in the kernel in modes ebpf and userspace, by mode, as `cleanup --dry-run`
      shows it.
    - `unread`: for each kind of trace that could not be read, the reason.
    """

    cni: tuple[CniFile, ...] = ()
    devices: frozenset[str] = frozenset()
    chains: Mapping[str, tuple[str, ...]] = {}
    tables: frozenset[str] = frozenset()
    programs: tuple[AttachedProgram, ...] = ()
    processes: tuple[Process, ...] = ()
    ports: frozenset[int] = frozenset()
    own: Mapping[str, tuple[str, ...]] = {}
    unread: Mapping[str, EbpfProxyError] = {}


def read(config: Config, cni_folder: Path | None = None) -> Traces:
    """Read all traces. `cni_folder`: None to find it. Raises nothing for what cannot be read."""
    unread: dict[str, EbpfProxyError] = {}
    folders = (cni_folder,) if cni_folder else cni_files.default_folders(config.proc_root)
    if cni_folder and not cni_folder.is_dir():
        unread["CNI files"] = NotFound(f"there is no folder {cni_folder}", "correct --cni-config-dir")
    chains: dict[str, tuple[str, ...]] = {}
    for name, rules in _attempt(unread, "iptables", _chains):
        chains[name] = (*chains.get(name, ()), *rules)
    at_cgroup = _attempt(unread, CGROUP_PROGRAMS, lambda: _cgroup_programs(config.cgroup_root))
    at_devices = _attempt(unread, DEVICE_PROGRAMS, _device_programs)
    return Traces(
        cni_files.read(folders),
        frozenset(_attempt(unread, "network devices", lambda: links.names().values())),
        chains,
        frozenset(_attempt(unread, "nftables", _tables)),
        (*at_cgroup, *at_devices),
        tuple(processes.in_own_netns(config.proc_root)),
        frozenset(_attempt(unread, "listening sockets", _ports)),
        dict(_attempt(unread, "objects of ebpfproxy", lambda: _own(config))),
        unread,
    )


def _attempt(unread: dict[str, EbpfProxyError], subject: str, function: Callable[[], Iterable[T]]) -> list[T]:
    """What the function returns; empty after an error, which is added to `unread`."""
    try:
        return list(function())
    except EbpfProxyError as failure:
        unread[subject] = failure
        return []


def _chains() -> Iterator[tuple[str, tuple[str, ...]]]:
    """No table is created, and no module is loaded."""
    for tools in probes.installed().values():
        for tool in tools:
            for (_, name), rules in entries.chains_of(tool.save()).items():
                yield name, tuple(rules)


def _tables() -> Iterator[str]:
    with Session() as session:
        yield from session.table_names()


def _own(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    for mode in MODES:
        if mode.name in _UNSHARED and (found := mode.remove(config, dry_run=True)):
            yield mode.name, tuple(found)


def _ports() -> Iterator[int]:
    for each in sockets.tcp([sockets.State.LISTEN]):
        yield each.source_port


def _cgroup_programs(root: Path | None) -> Iterator[AttachedProgram]:
    root = root or mounts.cgroup_root_of_all()
    for attach_type in _CONNECT:
        for number in cgroup.programs(root, attach_type):
            if name := _name(number):
                yield AttachedProgram(name, CGROUP)


def _device_programs() -> Iterator[AttachedProgram]:
    has_tcx = tcx.is_supported()
    for ifindex, device in links.names().items():
        for side in Side:
            for placed in tcx.programs(ifindex, side) if has_tcx else ():
                if name := _name(placed.program_id):
                    yield AttachedProgram(name, device)
            for each in tc.filters(ifindex, side):
                if each.name and not each.is_own:
                    yield AttachedProgram(each.name, device)


def _name(number: int) -> str:
    """The name of a program; "" if it has none, or if it is gone meanwhile."""
    with contextlib.suppress(NotFound), contextlib.closing(Program.by_id(number)) as program:
        return program.called
    return ""
