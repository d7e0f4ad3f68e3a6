"""Compiles the BPF programs, unless they are pinned; attaches, replaces and detaches them at socket hooks."""

import contextlib
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ebpfproxy.backends.ebpf import abi, features
from ebpfproxy.backends.ebpf.entries import ATTACHED, OUTDATED
from ebpfproxy.backends.ebpf.hooks import (
    CLASSIFIERS,
    ON_DEMAND,
    SCHED_CLS,
    SOCKET_HOOKS,
    TAIL_CALLS,
    TUNNEL_TAIL_CALLS,
    XDP,
    XDP_ATTACH_TYPE,
    XDP_PROGRAM,
    Hook,
)
from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES, MapSizes, missing, shapes
from ebpfproxy.backends.ebpf.migration import map_pins
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.errors import KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.bpf import bpf, cgroup, compiler
from ebpfproxy.linux.bpf.bpf import Link, Program
from ebpfproxy.linux.bpf.loader import SHARED_MAPS, ProgramSpec, load_and_pin, load_further
from ebpfproxy.linux.bpf.object_file import ObjectFile
from ebpfproxy.linux.bpf.xdp import Mode
from ebpfproxy.log import Logger

log = Logger(__name__)

COMPILED = "Compiled BPF programs"
"""There was no object file for this version. The next start uses the new one."""
LOADED = "Loaded BPF programs"
"""Logged at a start, unless pinned programs of the same version are used. Also logged when a device first
needs another program, with its `name`."""
REPLACED = "Removed pins of another version"
"""Programs or maps that are no longer in force."""

_SOURCES = ("connect.c", "tc.c", "xdp.c")


def available_hooks() -> tuple[Hook, ...]:
    """Those of SOCKET_HOOKS that this kernel has, found by loading a program for each.

    Raises Unsupported if a required hook is missing, Rejected if capabilities are missing.
    """
    found = []
    for hook in SOCKET_HOOKS:
        if bpf.loads(hook.program_type, hook.attach_type, features.RETURN_1):
            found.append(hook)
        elif not hook.optional:
            raise Unsupported(
                f"this kernel has no cgroup hook {hook.name} (since Linux {hook.since})",
                "use a newer kernel, or one built with CONFIG_CGROUP_BPF and CONFIG_IPV6",
            )
    return tuple(found)


def tail_calls(tunnels: bool) -> tuple[str, ...]:
    """The programs of the map `tail_calls`. `tunnels`: with those that only direct server return needs."""
    return tuple(name for name in TAIL_CALLS if tunnels or name not in TUNNEL_TAIL_CALLS)


def specs(hooks: Iterable[Hook], tunnels: bool = True) -> tuple[ProgramSpec, ...]:
    """All programs but the XDP program, if the kernel has these socket hooks. `tunnels`: see `tail_calls`."""
    of_sockets = (ProgramSpec(hook.name, hook.program_type, hook.attach_type) for hook in hooks)
    names = (*CLASSIFIERS, *tail_calls(tunnels))
    return (*of_sockets, *(ProgramSpec(name, SCHED_CLS, 0) for name in names))


def xdp_spec(mode: Mode) -> ProgramSpec:
    """The XDP program for this mode. Raises Rejected if loading programs is not permitted."""
    return ProgramSpec(XDP_PROGRAM, XDP, XDP_ATTACH_TYPE, features.xdp_flags(mode))


def sources() -> tuple[Path, ...]:
    """The files that are compiled together."""
    return tuple(abi.source_directory() / name for name in _SOURCES)


def object_file() -> ObjectFile:
    """The object file of all programs, for any kernel and any sizes of maps.

    It is compiled if there is none yet, which takes some seconds. Raises KernelError.
    """
    found, is_new = compiler.compiled(sources(), COMPILED_SIZES.defines())
    if is_new:
        log.info(COMPILED, digest=found.digest[:10])
    return found


def has_object_file() -> bool:
    """Whether `object_file` needs no compiler."""
    return compiler.is_compiled(sources(), COMPILED_SIZES.defines())


class PinnedPrograms:
    """The pinned programs of one folder, and their state at the hooks of one cgroup. Changes nothing."""

    def __init__(
        self,
        pins: Pins,
        cgroup_root: Path,
        directory: Path,
        hooks: Collection[Hook],
        tunnels: bool = False,
    ) -> None:
        """Call `open` before other methods. `hooks`: those that the kernel has.

        `tunnels`: see `tail_calls`.
        """
        self.hooks = tuple(hooks)
        self.directory = directory
        self.maps = directory / "maps"
        self._pins = pins
        self._cgroup = cgroup_root
        self._specs = specs(self.hooks, tunnels)
        self._names = {spec.name for spec in self._specs}.difference(ON_DEMAND)
        self._programs: dict[str, Program] = {}
        self._ids: dict[str, int] = {}
        self._links: bool | None = None

    def open(self) -> None:
        """Open all programs. Raises KernelError."""
        self._names.update(name for name in ON_DEMAND if (self.directory / name).exists())
        try:
            for name in self._names:
                self._programs[name] = Program.pinned(self.directory / name)
                self._ids[name] = self._programs[name].id
        except KernelError:
            self.close()
            raise

    def classifier(self, name: str) -> Program:
        """The program with this name of CLASSIFIERS. Raises NotFound if it is not pinned."""
        if name not in self._programs:
            raise NotFound(f"the program {name} is not loaded")
        return self._programs[name]

    def classifier_ids(self) -> dict[str, int]:
        """The ids of the classifiers that are loaded, by name."""
        return {name: self._ids[name] for name in CLASSIFIERS if name in self._ids}

    def xdp_id(self) -> int:
        """The id of the XDP program. 0 if it is not loaded."""
        return self._ids.get(XDP_PROGRAM, 0)

    def hook_ids(self) -> dict[Hook, int]:
        """The id of the program of each hook."""
        return {hook: self._ids[hook.name] for hook in self.hooks}

    def missing_pins(self) -> list[str]:
        """The names of programs and maps that are not pinned.

        SHARED_MAPS are among them: the kernel empties the map of tail calls when its last pin is removed, and
        programs that are loaded later need the scratch of the others.
        """
        names = (*sorted(self._names), *SHARED_MAPS)
        return [name for name in names if not (self.directory / name).exists()] + missing(self.maps)

    def hook_states(self) -> dict[str, str]:
        """The state by hook name: ATTACHED or OUTDATED. Hooks without any program of the agent are left out.

        ATTACHED: this object's program is attached to the cgroup and runs for every process below it.
        OUTDATED: a program of another version is attached, or a pinned link has no effect. A link has no
        effect if its cgroup is another one (cilium #48420).
        """
        states = {hook.name: self._state(hook) for hook in self.hooks}
        return {name: state for name, state in states.items() if state}

    def _state(self, hook: Hook) -> str:
        with contextlib.suppress(KernelError, OSError):
            in_force = cgroup.programs(self._cgroup, hook.attach_type, effective=True)
            if self._ids[hook.name] in in_force and self._is_linked_here(hook):
                return ATTACHED
        if (self._pins.links / hook.name).exists():
            return OUTDATED
        with contextlib.suppress(KernelError, OSError), contextlib.ExitStack() as stack:
            present = cgroup.programs(self._cgroup, hook.attach_type)
            for program in pinned_programs(self._pins, hook.name):
                stack.callback(program.close)
                if program.id in present:
                    return OUTDATED
        return ""

    def _is_linked_here(self, hook: Hook) -> bool:
        """Whether it is attached to this cgroup itself, and not to one above."""
        try:
            link = Link.pinned(self._pins.links / hook.name)
        except NotFound:
            attached = cgroup.programs(self._cgroup, hook.attach_type)
            return self._links is not True and self._ids[hook.name] in attached
        try:
            return link.cgroup_id == self._cgroup.stat().st_ino
        finally:
            link.close()

    def close(self) -> None:
        for program in self._programs.values():
            program.close()


class Programs(PinnedPrograms):
    """The loaded and pinned programs of one source with its settings, and their attachments to one cgroup."""

    def __init__(
        self,
        pins: Pins,
        cgroup_root: Path,
        sizes: MapSizes,
        tunnels: bool = False,
        xdp: Mode | None = None,
    ) -> None:
        """Load them, unless a previous run left them pinned. Raises KernelError. `tunnels`: see `tail_calls`.

        `xdp`: the mode of the XDP program, for `xdp`. None: there is none.
        """
        hooks = available_hooks()
        self._numbers = sizes.numbers() | features.numbers(features.present())
        code = compiler.code(sources())
        wanted = specs(hooks, tunnels)
        self._xdp_spec = xdp_spec(xdp) if xdp else None
        if self._xdp_spec:
            wanted += (self._xdp_spec,)
        directory = pins.programs(code + str(sizes) + str(self._numbers) + str(wanted))
        super().__init__(pins, cgroup_root, directory, hooks, tunnels)
        if not self.is_pinned():
            file = object_file()
            links = self._provide_maps(sizes, pins.in_force())
            at_once = [spec for spec in self._specs if spec.name in self._names]
            load_and_pin(file, at_once, self._numbers, links, self.directory, tail_calls(tunnels))
            log.info(LOADED, programs=len(at_once), folder=self.directory.name)
        self.open()

    def classifier(self, name: str) -> Program:
        """The program with this name of CLASSIFIERS. Those of ON_DEMAND are loaded at the first call.

        Raises KernelError.
        """
        if name not in self._programs:
            (spec,) = (spec for spec in self._specs if spec.name == name)
            self._load(spec)
        return self._programs[name]

    def xdp(self) -> Program:
        """The XDP program, which is loaded at the first call. Raises KernelError; NotFound without a mode."""
        if self._xdp_spec is None:
            raise NotFound(f"the program {XDP_PROGRAM} is not used")
        if XDP_PROGRAM not in self._programs:
            self._load(self._xdp_spec)
        return self._programs[XDP_PROGRAM]

    def _load(self, spec: ProgramSpec) -> None:
        load_further(object_file(), spec, self._numbers, self.maps, self.directory)
        self._programs[spec.name] = Program.pinned(self.directory / spec.name)
        self._ids[spec.name] = self._programs[spec.name].id
        self._names.add(spec.name)
        log.info(LOADED, programs=1, folder=self.directory.name, name=spec.name)

    def is_pinned(self) -> bool:
        """Whether all pins that `__init__` created or found still exist."""
        return not self.missing_pins()

    def _provide_maps(self, sizes: MapSizes, in_force: Path | None) -> Path:
        """Provide the maps, and a folder of links to them, to which the loader adds the programs.

        If a pin of a map in force is missing, all maps are created again. Otherwise the attached programs
        would continue to use the unpinned map, while this agent writes to a new one.
        """
        partial = self.directory.with_name(f"{self.directory.name}_partial")
        try:
            previous = self._pins.maps_of(in_force)
            if in_force and not all(pin.exists() for pin in previous.values()):
                for folder in (in_force / "maps", self._pins.maps):
                    shutil.rmtree(folder, ignore_errors=True)
                previous = {}
            shutil.rmtree(partial, ignore_errors=True)
            self._pins.remove_unlinked_maps()
            map_pins.provide(self._pins, partial / "maps", shapes(sizes), previous)
            shutil.rmtree(self.directory, ignore_errors=True)  # only now: it links the maps in force
        except OSError as failure:
            raise Rejected(f"cannot pin maps in {self._pins.root}: {failure.strerror}") from failure
        return partial / "maps"

    def attach(self, names: Iterable[str]) -> Mapping[str, KernelError]:
        """Attach these hooks' programs, in the order of SOCKET_HOOKS. Returns the failures by hook name."""
        wanted = set(names)
        failed: dict[str, KernelError] = {}
        for hook in self.hooks:
            if hook.name not in wanted:
                continue
            try:
                self._pins.links.mkdir(exist_ok=True)
                self._attach(hook)
            except KernelError as failure:
                failed[hook.name] = failure
            except OSError as failure:
                failed[hook.name] = Rejected(f"cannot pin the link {hook.name}: {failure.strerror}")
        return failed

    def detach(self, names: Iterable[str]) -> Mapping[str, KernelError]:
        """Detach the agent's programs from these hooks, those that redirect sockets first.

        Returns the failures by hook name.
        """
        wanted = set(names)
        failed: dict[str, KernelError] = {}
        for hook in reversed(self.hooks):
            if hook.name in wanted:
                try:
                    _detach(hook, self._pins, self._cgroup)
                except KernelError as failure:
                    failed[hook.name] = failure
                except OSError as failure:
                    failed[hook.name] = Rejected(f"cannot unpin the link {hook.name}: {failure.strerror}")
        return failed

    def _attach(self, hook: Hook) -> None:
        program = self._programs[hook.name]
        if self._links is not False:
            try:
                cgroup.attach_link(program, self._cgroup, hook.attach_type, self._pins.links / hook.name)
                self._links = True
                return
            except Unsupported:
                if self._links:
                    raise
                self._links = False
        previous = self._previous(hook)
        try:
            cgroup.attach_multi(program, self._cgroup, hook.attach_type, previous)
        finally:
            if previous:
                previous.close()

    def _previous(self, hook: Hook) -> Program | None:
        """The program of another version that is attached without a link, found by its pin."""
        present = cgroup.programs(self._cgroup, hook.attach_type)
        for program in pinned_programs(self._pins, hook.name):
            if program.id in present and program.id != self._ids[hook.name]:
                return program
            program.close()
        return None

    def settle(self) -> None:
        """Record these programs as in force; unpin all others. Call it once everything is attached."""
        self._pins.set_current(self.directory)
        for path in self._pins.remove_others(self.directory):
            log.info(REPLACED, what=path.relative_to(self._pins.root))


def first_needed(failed: Mapping[str, KernelError]) -> KernelError | None:
    """The first failure of a required hook. `failed` is by hook name. None if there is no such failure."""
    return next(
        (failed[hook.name] for hook in SOCKET_HOOKS if hook.name in failed and not hook.optional), None
    )


def pinned_programs(pins: Pins, name: str) -> Iterable[Program]:
    """All pinned programs of a hook, of any version."""
    for path in pins.pinned_programs(name):
        with contextlib.suppress(NotFound):
            yield Program.pinned(path)


def pinned_classifiers(pins: Pins) -> frozenset[int]:
    """The ids of all pinned programs for devices, of any version."""
    found = set()
    for program in (each for name in CLASSIFIERS for each in pinned_programs(pins, name)):
        with contextlib.closing(program):
            found.add(program.id)
    return frozenset(found)


def detach_all(
    pins: Pins, cgroup_root: Path | None, hooks: Collection[Hook] = SOCKET_HOOKS, dry_run: bool = False
) -> list[str]:
    """Detach the agent's programs from these hooks, and from hooks that only another version has.

    Returns what was detached. The result is empty if nothing was attached. With `dry_run` nothing changes,
    and the result is what would be detached.
    """
    wanted = (hook for hook in reversed(SOCKET_HOOKS) if hook in hooks)
    removed = [what for hook in wanted for what in _detach(hook, pins, cgroup_root, dry_run)]
    known = {path.name for hook in SOCKET_HOOKS for path in _link_pins(pins, hook)}
    for path in sorted(pins.links.iterdir()) if pins.links.is_dir() else ():
        if path.name not in known:
            if not dry_run:
                cgroup.detach_link(path)
            removed.append(f"link {path.name}")
    return removed


def _link_pins(pins: Pins, hook: Hook) -> tuple[Path, Path]:
    """The pin of a hook's link, and the pin of a new link until it replaces that one."""
    return pins.links / hook.name, pins.links / f"{hook.name}_new"


def _detach(hook: Hook, pins: Pins, cgroup_root: Path | None, dry_run: bool = False) -> list[str]:
    """Detach a hook's programs; return what was detached.

    `cgroup_root` is only needed if the kernel has no cgroup links.
    """
    removed = []
    for path in _link_pins(pins, hook):
        if path.exists():
            if not dry_run:
                cgroup.detach_link(path)
            removed.append(f"link {path.name}")
    if cgroup_root is None or (dry_run and removed):  # the kernel's list includes programs of links, too
        return removed
    for program in pinned_programs(pins, hook.name):
        with contextlib.closing(program):
            if dry_run:
                attached = program.id in cgroup.programs(cgroup_root, hook.attach_type)
            else:
                attached = cgroup.detach(program, cgroup_root, hook.attach_type)
        if attached:
            removed.append(f"program {hook.name}")
    return removed
