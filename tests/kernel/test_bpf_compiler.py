"""bcc for real: what it makes, what it says of bad programs, and its idea of our structs."""

import contextlib
import ctypes
import errno
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import abi, features, programs
from ebpfproxy.backends.ebpf.hooks import SCHED_CLS
from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES, MapSizes
from ebpfproxy.backends.ebpf.mode import load_programs
from ebpfproxy.backends.ebpf.programs import object_file
from ebpfproxy.errors import KernelError, ProgramRejected, Rejected
from ebpfproxy.linux.bpf import compiler
from ebpfproxy.linux.bpf.bpf import Map, Program
from ebpfproxy.linux.bpf.loader import ProgramSpec, load_and_pin
from tests.support import altered
from tests.support.bpf_place import CONNECT4, SOCK_ADDR, BpfPlace, bpf_place, build_maps

pytestmark = pytest.mark.kernel

CONNECT = ProgramSpec("connect4", SOCK_ADDR, CONNECT4)
SIZES = MapSizes(8, 16, 16, 16, 16, 16, 16)


@pytest.fixture(scope="module")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of ours, for changing."""
    shutil.copytree(abi.source_directory(), tmp_path / "bpf")
    return tmp_path / "bpf"


def numbers() -> dict[int, int]:
    return SIZES.numbers() | features.numbers(features.present())


def build(maps: Path, pins: Path, programs: Sequence[ProgramSpec], *sources: Path) -> None:
    """Compile, load, and pin."""
    file, _ = compiler.compiled(sources, COMPILED_SIZES.defines())
    load_and_pin(file, programs, numbers(), maps, pins)


def compile_(place: BpfPlace, source: Path, *programs: ProgramSpec, name: str) -> Path:
    """The folder of the pinned programs, which has the maps in a folder beside it."""
    maps = build_maps(place, SIZES, name)
    build(maps, place.bpffs / name / "loaded", programs, source)
    return place.bpffs / name


def failure_of(place: BpfPlace, source: Path, *programs: ProgramSpec, name: str) -> KernelError:
    with pytest.raises(Rejected) as caught:
        compile_(place, source, *programs, name=name)
    assert not (place.bpffs / name / "loaded").exists()
    return caught.value


def test_programs_appear_all_at_once_beside_their_maps(place: BpfPlace) -> None:
    folder = compile_(place, abi.source_directory() / "connect.c", CONNECT, name="good")
    assert [path.name for path in (folder / "loaded").iterdir()] == ["connect4"]
    assert not (folder / "loaded_partial").exists()
    program = Program.pinned(folder / "loaded" / "connect4")
    assert program.id
    program.close()


def test_programs_of_two_sources_share_their_maps(place: BpfPlace) -> None:
    maps = build_maps(place, SIZES, "both")
    folder = place.bpffs / "both"
    source, beside = (abi.source_directory() / name for name in ("connect.c", "tc.c"))
    specs = (CONNECT, ProgramSpec("from_any", SCHED_CLS, 0))
    build(maps, folder / "loaded", specs, source, beside)
    assert {path.name for path in (folder / "loaded").iterdir()} == {"connect4", "from_any"}
    services = Map.pinned(maps / "services")
    try:
        users = [map_ids(folder / "loaded" / name) for name in ("connect4", "from_any")]
        assert all(services.shape.id in ids for ids in users)
    finally:
        services.close()


def map_ids(pin: Path) -> set[int]:
    """The maps that a program uses, by id: nr_map_ids and map_ids of struct bpf_prog_info."""
    program = Program.pinned(pin)
    try:
        room = (ctypes.c_uint32 * 64)()
        asked = bytearray(64)
        struct.pack_into("=IQ", asked, 52, len(room), ctypes.addressof(room))
        count = struct.unpack_from("=I", program.facts(64, bytes(asked)), 52)[0]
        return set(room[:count])
    finally:
        program.close()


def test_maps_that_are_pinned_are_used_again_with_what_is_in_them(place: BpfPlace) -> None:
    source = abi.source_directory() / "connect.c"
    folder = compile_(place, source, CONNECT, name="twice")
    maps = folder / "maps"
    with contextlib.closing(Map.pinned(maps / "service_names")) as with_entry:
        with_entry.update(b"\1\0\0\0", bytes(abi.SERVICE_NAME.size))
    build(maps, folder / "more", (CONNECT,), source)
    with contextlib.closing(Map.pinned(maps / "services")) as services:
        assert services.shape.id in map_ids(folder / "loaded" / "connect4")
        assert services.shape.id in map_ids(folder / "more" / "connect4")
    with contextlib.closing(Map.pinned(maps / "service_names")) as names:
        assert names.lookup(b"\1\0\0\0") is not None


def test_the_pins_of_a_killed_agent_are_replaced(place: BpfPlace) -> None:
    maps = build_maps(place, SIZES, "killed")
    folder = place.bpffs / "killed"
    (folder / "loaded_partial" / "old").mkdir(parents=True)
    build(maps, folder / "loaded", (CONNECT,), abi.source_directory() / "connect.c")
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []


def test_a_mistake_in_a_header_is_told_by_that_headers_name_and_line(place: BpfPlace, sources: Path) -> None:
    header = sources / "service.h"
    lines = header.read_text().splitlines()
    lines.append("static int broken(void) { return no_such_thing; }")
    header.write_text("\n".join(lines) + "\n")
    failure = failure_of(place, sources / "connect.c", CONNECT, name="mistake")
    assert failure.message.startswith("cannot compile connect.c: ")
    assert f"service.h:{len(lines)}:" in failure.message
    assert "no_such_thing" in failure.message


def test_a_function_that_is_declared_nowhere_is_a_mistake(place: BpfPlace, sources: Path) -> None:
    """clang alone would warn, and the verifier then say something else."""
    source = sources / "connect.c"
    source.write_text(source.read_text() + "\nint extra(struct bpf_sock_addr *ctx) { return nobody(ctx); }\n")
    failure = failure_of(place, source, CONNECT, name="undeclared")
    assert "nobody" in failure.message
    assert "connect.c:" in failure.message


def test_a_program_that_the_verifier_rejects_is_named_with_the_reason(place: BpfPlace, sources: Path) -> None:
    source = sources / "connect.c"
    source.write_text(
        source.read_text() + "\nint bad(struct bpf_sock_addr *ctx) { return *(int *)(long)ctx->user_port; }\n"
    )
    failure = failure_of(place, source, CONNECT, ProgramSpec("bad", SOCK_ADDR, CONNECT4), name="refused")
    assert isinstance(failure, ProgramRejected)
    assert (failure.program, failure.errno) == ("bad", errno.EACCES)
    assert "invalid mem access" in failure.verifier[-1]
    assert failure.message == f"cannot load BPF program bad: Permission denied: {failure.verifier[-1]}"
    assert failure.hint
    assert any("processed " in note for note in failure.__notes__), "the complete log of the verifier"


def test_a_long_log_of_the_verifier_is_cut_to_its_end(place: BpfPlace, sources: Path) -> None:
    """A log with all steps of this program has more than the 16 MB that the kernel accepts."""
    source = sources / "connect.c"
    source.write_text(
        source.read_text() + "\nint bad(struct bpf_sock_addr *ctx) { volatile int n = 0;\n"
        "for (int i = 0; i < 60000; i++) n += i;\nreturn *(int *)(long)ctx->user_port; }\n"
    )
    failure = failure_of(place, source, ProgramSpec("bad", SOCK_ADDR, CONNECT4), name="long")
    assert isinstance(failure, ProgramRejected)
    assert "invalid mem access" in failure.verifier[-1]
    assert 1 <= len(failure.verifier) <= 5
    assert all(len(line) <= 200 for line in failure.verifier)


def test_a_program_that_is_not_in_the_source_is_named(place: BpfPlace) -> None:
    spec = ProgramSpec("absent", SOCK_ADDR, CONNECT4)
    failure = failure_of(place, abi.source_directory() / "connect.c", spec, name="absent")
    assert isinstance(failure, ProgramRejected)
    assert (failure.program, failure.errno, failure.verifier) == ("absent", 0, ())
    assert "absent" in failure.message


def test_a_trial_finds_what_the_verifier_rejects(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_programs().present
    altered.reject(sources)
    monkeypatch.setattr(abi, "source_directory", lambda: sources)
    finding = load_programs()
    assert (finding.failure, finding.needed) == (errno.EACCES, True)
    assert altered.REJECTED in finding.missing
    assert altered.REASON in finding.missing
    assert finding.remedy


def test_the_bpf_compiler_lays_out_every_struct_as_python_does(sources: Path) -> None:
    """Regression, projectcalico/calico 2a9648d33f: the target's own compiler is asked, not the host's."""
    compiler.compile_sources([asserting(sources, 0)], {})
    with pytest.raises(Rejected, match="service_key"):
        compiler.compile_sources([asserting(sources, 1)], {})


def asserting(sources: Path, error: int) -> Path:
    """A source that compiles if every size and offset is Python's plus `error`."""
    lines = ["#include <uapi/linux/bpf.h>", '#include "abi.h"']
    for name, layout in abi.LAYOUTS.items():
        facts = [(f"sizeof(struct {name})", layout.size)]
        facts += [(f"__builtin_offsetof(struct {name}, {f.name})", f.offset) for f in layout.fields]
        facts += [(f"sizeof(((struct {name} *)0)->{f.name})", f.size) for f in layout.fields]
        lines += [f'_Static_assert({text} == {value + error}, "{name}");' for text, value in facts]
    source = sources / "layouts.c"
    source.write_text("\n".join(lines) + "\n")
    return source


def test_nothing_is_left_open_by_a_build(place: BpfPlace) -> None:
    before = len(list(os.scandir("/proc/self/fd")))
    compile_(place, abi.source_directory() / "connect.c", CONNECT, name="closed")
    assert len(list(os.scandir("/proc/self/fd"))) == before


def test_the_agent_has_a_number_for_each_placeholder_and_each_is_used() -> None:
    """Otherwise the programs would have the placeholder as the size of a map."""
    placeholders = {value for name, value in abi.CONSTANTS.items() if name.startswith("PLACEHOLDER_")}
    assert numbers().keys() == placeholders
    code = b"".join(program.instructions for program in object_file().programs)
    assert all(struct.pack("=I", value) in code for value in placeholders)


@pytest.mark.long  # clang takes ten seconds
def test_an_object_file_has_no_sizes_of_maps_in_its_programs() -> None:
    """So one object file serves agents with any --ebpf-*-max."""
    small, large = object_file(), compiler.compile_sources(programs.sources(), MapSizes().defines())
    assert small.programs == large.programs
    assert [each.name for each in small.maps] == [each.name for each in large.maps]


def test_an_agent_without_bcc_uses_the_object_file(monkeypatch: pytest.MonkeyPatch) -> None:
    object_file()
    monkeypatch.setattr(compiler, "compile_sources", lambda *_: pytest.fail("it has to be in the cache"))
    assert load_programs().present
