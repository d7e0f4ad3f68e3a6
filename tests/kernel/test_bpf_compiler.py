"""bcc for real: what it makes, what it says of bad programs, and its idea of our structs."""

import ctypes
import errno
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import abi, features
from ebpfproxy.backends.ebpf.hooks import CLASSIFIERS, SCHED_CLS
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.ebpf.mode import load_programs
from ebpfproxy.errors import KernelError, ProgramRejected, Rejected
from ebpfproxy.linux.bpf.bpf import Map, Program
from ebpfproxy.linux.bpf.compiler import ProgramSpec, build
from tests.support import altered
from tests.support.bpf_place import CONNECT4, SOCK_ADDR, BpfPlace, bpf_place

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


def compile_(place: BpfPlace, source: Path, *programs: ProgramSpec, name: str) -> Path:
    folder = place.bpffs / name
    (folder / "maps").mkdir(parents=True)
    build(source, SIZES.defines(), programs, folder / "maps", folder / "programs")
    return folder


def failure_of(place: BpfPlace, source: Path, *programs: ProgramSpec, name: str) -> KernelError:
    with pytest.raises(Rejected) as caught:
        compile_(place, source, *programs, name=name)
    assert not (place.bpffs / name / "programs").exists()
    return caught.value


def test_programs_appear_all_at_once_beside_their_maps(place: BpfPlace) -> None:
    folder = compile_(place, abi.source_directory() / "connect.c", CONNECT, name="good")
    assert [path.name for path in (folder / "programs").iterdir()] == ["connect4"]
    assert not (folder / "programs_partial").exists()
    program = Program.pinned(folder / "programs" / "connect4")
    assert program.id
    program.close()


def test_programs_of_two_sources_share_their_maps(place: BpfPlace) -> None:
    folder = place.bpffs / "both"
    (folder / "maps").mkdir(parents=True)
    source, beside = (abi.source_directory() / name for name in ("connect.c", "tc.c"))
    specs = (CONNECT, *(ProgramSpec(name, SCHED_CLS, 0) for name in CLASSIFIERS))
    settings = SIZES.defines() | features.defines()
    build(source, settings, specs, folder / "maps", folder / "programs", beside=(beside,))
    assert {path.name for path in (folder / "programs").iterdir()} == {"connect4", *CLASSIFIERS}
    services = Map.pinned(folder / "maps" / "services")
    try:
        users = [map_ids(folder / "programs" / name) for name in ("connect4", "from_any")]
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
    with_entry = Map.pinned(folder / "maps" / "service_names")
    with_entry.update(b"\1\0\0\0", bytes(abi.SERVICE_NAME.size))
    build(source, SIZES.defines(), (CONNECT,), folder / "maps", folder / "more")
    again = Map.pinned(folder / "maps" / "service_names")
    assert again.shape.id == with_entry.shape.id
    assert again.lookup(b"\1\0\0\0") is not None
    with_entry.close()
    again.close()


def test_what_a_killed_compiler_left_is_replaced(place: BpfPlace) -> None:
    (place.bpffs / "killed" / "programs_partial").mkdir(parents=True)
    (place.bpffs / "killed" / "programs_partial" / "old").mkdir()
    folder = place.bpffs / "killed"
    (folder / "maps").mkdir()
    source = abi.source_directory() / "connect.c"
    build(source, SIZES.defines(), (CONNECT,), folder / "maps", folder / "programs")
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []


def test_a_mistake_in_a_header_is_told_by_that_headers_name_and_line(place: BpfPlace, sources: Path) -> None:
    header = sources / "service.h"
    lines = header.read_text().splitlines()
    lines.append("static int broken(void) { return no_such_thing; }")
    header.write_text("\n".join(lines) + "\n")
    failure = failure_of(place, sources / "connect.c", CONNECT, name="mistake")
    assert failure.message.startswith("cannot load the programs of connect.c: ")
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
    """The log of a program that ends after a long way has megabytes, which a pipe does not hold."""
    source = sources / "connect.c"
    source.write_text(
        source.read_text() + "\nint bad(struct bpf_sock_addr *ctx) { volatile int n = 0;\n"
        "for (int i = 0; i < 60000; i++) n += i;\nreturn *(int *)(long)ctx->user_port; }\n"
    )
    failure = failure_of(place, source, ProgramSpec("bad", SOCK_ADDR, CONNECT4), name="long")
    assert isinstance(failure, ProgramRejected)
    assert "invalid mem access" in failure.verifier[-1]
    assert len(failure.verifier) == 5
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


def test_the_bpf_compiler_lays_out_every_struct_as_python_does(place: BpfPlace, sources: Path) -> None:
    """Regression, projectcalico/calico 2a9648d33f: the target's own compiler is asked, not the host's."""
    build(asserting(sources, 0), {}, (), place.bpffs / "no_maps", place.bpffs / "layouts")
    with pytest.raises(Rejected, match="service_key"):
        build(asserting(sources, 1), {}, (), place.bpffs / "no_maps", place.bpffs / "wrong_layouts")


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
