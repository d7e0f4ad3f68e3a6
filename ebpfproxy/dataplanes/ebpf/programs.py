"""The programs: compiled where this code was not yet, attached to their hooks, replaced, detached."""

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.hooks import SOCKET_HOOKS, Hook
from ebpfproxy.dataplanes.ebpf.maps import MapSizes, is_complete
from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.errors import KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.kernel import bpf, cgroup
from ebpfproxy.kernel.bpf import Link, Program
from ebpfproxy.kernel.compiler import ProgramSpec, build, expand
from ebpfproxy.log import Logger

log = Logger(__name__)

_SOURCE = "connect.c"
_SET_RETVAL = 187  # BPF_FUNC_set_retval


def _instruction(code: int, register: int = 0, immediate: int = 0) -> bytes:
    """struct bpf_insn, without offset and source register."""
    return bytes((code, register, 0, 0)) + immediate.to_bytes(4, "little", signed=True)


_RETURN_1 = _instruction(0xB7, 0, 1) + _instruction(0x95)  # r0 = 1; exit
_CALLS_SET_RETVAL = _instruction(0xB7, 1, -111) + _instruction(0x85, 0, _SET_RETVAL) + _RETURN_1


def available_hooks() -> tuple[Hook, ...]:
    """Those of SOCKET_HOOKS that this kernel has, found by loading a program for each.

    Raises Unsupported where one is missing that we cannot do without, Rejected without the capabilities.
    """
    found = []
    for hook in SOCKET_HOOKS:
        if bpf.loads(hook.program_type, hook.attach_type, _RETURN_1):
            found.append(hook)
        elif not hook.optional:
            raise Unsupported(
                f"this kernel has no cgroup hook {hook.name} (Linux has it since {hook.since})",
                "use a newer kernel, or one built with CONFIG_CGROUP_BPF and CONFIG_IPV6",
            )
    return tuple(found)


def defines(sizes: MapSizes) -> dict[str, str]:
    """The compiler's command line: the maps' sizes, and what the kernel was found to have."""
    found = sizes.defines()
    connect = next(hook for hook in SOCKET_HOOKS if hook.name == "connect4")
    if bpf.loads(connect.program_type, connect.attach_type, _CALLS_SET_RETVAL):
        found["HAVE_SET_RETVAL"] = "1"
    return found


class Programs:
    """The programs of one code for one layout, loaded and pinned, and their attachments to one cgroup."""

    def __init__(self, pins: Pins, cgroup_root: Path, sizes: MapSizes, kept_open: tuple[int, ...]) -> None:
        """Compile and load them, unless a former run left them pinned. Raises KernelError.

        `kept_open`: see `compiler.build`.
        """
        self.hooks = available_hooks()
        self.layout = pins.layout(sizes)
        self.maps = self.layout / "maps"
        self._pins = pins
        self._cgroup = cgroup_root
        source = abi.source_directory() / _SOURCE
        settings = defines(sizes)
        self.directory = pins.programs(self.layout, expand(source) + str(settings) + str(self.hooks))
        if not self.is_pinned():
            self._make_room()
            specs = tuple(ProgramSpec(h.name, h.program_type, h.attach_type) for h in self.hooks)
            build(source, settings, specs, self.maps, self.directory, kept_open)
            log.info("compiled and loaded", programs=len(specs), layout=self.layout.name)
        self._programs = {hook.name: Program.pinned(self.directory / hook.name) for hook in self.hooks}
        self._ids = {name: program.id for name, program in self._programs.items()}
        self._links: bool | None = None

    def is_pinned(self) -> bool:
        """Whether everything that `__init__` made, or found, is still there."""
        return is_complete(self.maps) and all((self.directory / hook.name).exists() for hook in self.hooks)

    def _make_room(self) -> None:
        """Where one map's pin is missing all are made anew, since programs and maps belong together: those
        that are attached would go on using the old ones, and share some with what we write."""
        if not is_complete(self.maps):
            shutil.rmtree(self.layout, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        try:
            self.maps.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise Rejected(f"cannot make {self.maps}: {failure.strerror}") from failure

    def attached(self) -> list[str]:
        """The hooks where our programs run for every process below the cgroup: attached, and in force.

        A link may exist and yet do nothing, since its cgroup is another one (cilium #48420).
        """
        found = []
        for hook in self.hooks:
            with contextlib.suppress(KernelError, OSError):
                in_force = cgroup.programs(self._cgroup, hook.attach_type, effective=True)
                if self._ids[hook.name] in in_force and self._is_linked_here(hook):
                    found.append(hook.name)
        return found

    def _is_linked_here(self, hook: Hook) -> bool:
        """Whether it is attached to this very cgroup, and not to one above."""
        try:
            link = Link.pinned(self._pins.links / hook.name)
        except NotFound:
            attached = cgroup.programs(self._cgroup, hook.attach_type)
            return self._links is not True and self._ids[hook.name] in attached
        try:
            return link.cgroup_id == self._cgroup.stat().st_ino
        finally:
            link.close()

    def attach(self, names: Iterable[str]) -> Mapping[str, KernelError]:
        """Attach these hooks' programs, in the order of SOCKET_HOOKS; what failed, by name."""
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
        former = self._former(hook)
        try:
            cgroup.attach_multi(program, self._cgroup, hook.attach_type, former)
        finally:
            if former:
                former.close()

    def _former(self, hook: Hook) -> Program | None:
        """The program of another code or layout that is attached without a link, found by its pin."""
        present = cgroup.programs(self._cgroup, hook.attach_type)
        for program in pinned_programs(self._pins, hook.name):
            if program.id in present and program.id != self._ids[hook.name]:
                return program
            program.close()
        return None

    def settle(self) -> None:
        """Everything is attached: this layout is the current one, and others are let go."""
        self._pins.set_current(self.layout)
        for path in self._pins.remove_others(self.layout, self.directory):
            log.info("replaced", what=path.relative_to(self._pins.root))

    def close(self) -> None:
        for program in self._programs.values():
            program.close()


def pinned_programs(pins: Pins, name: str) -> Iterable[Program]:
    """All programs of a hook that are pinned, of whatever layout and code."""
    for layout in pins.layouts():
        for path in sorted(layout.glob(f"programs_*/{name}")):
            with contextlib.suppress(NotFound):
                yield Program.pinned(path)


def detach_all(pins: Pins, cgroup_root: Path | None) -> list[str]:
    """Take our programs off their hooks; what was detached. No error where nothing is."""
    linked = sorted(pins.links.iterdir()) if pins.links.is_dir() else []
    for path in linked:
        path.unlink()
    removed = [f"link {path.name}" for path in linked]
    if cgroup_root is None:
        return removed
    for hook in SOCKET_HOOKS:
        for program in pinned_programs(pins, hook.name):
            try:
                if cgroup.detach(program, cgroup_root, hook.attach_type):
                    removed.append(f"program {hook.name}")
            finally:
                program.close()
    return removed
