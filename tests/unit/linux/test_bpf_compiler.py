"""Putting headers in place, and what is said where there is no bcc."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.errors import Rejected, Unsupported
from ebpfproxy.linux.bpf.compiler import compile_sources, expand

REPOSITORY = Path(__file__).parents[3]
SOURCES = abi.source_directory()


def origins(text: str) -> list[tuple[str, int, str]]:
    """Of each line of an expanded source: the file, the number there, and the line, by #line alone."""
    found, file, number = [], "", 0
    for line in text.splitlines():
        mark = re.fullmatch(r'#line (\d+) "([^"]+)"', line)
        if mark:
            number, file = int(mark[1]), mark[2]
        else:
            found.append((file, number, line))
            number += 1
    return found


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "deep.h").write_text("#pragma once\n\nstruct deep {};\n")
    (tmp_path / "left.h").write_text('#pragma once\n#include "deep.h"\nint left;\n')
    (tmp_path / "right.h").write_text('/* a comment */\n#pragma once\n#include "deep.h"\nint right;\n')
    (tmp_path / "main.c").write_text(
        '#include <linux/bpf.h>\n#include "left.h"\n#include "right.h"\n'
        'int main;\n#include "left.h"\nint end;\n'
    )
    return tmp_path


def test_each_header_is_expanded_once(sources: Path) -> None:
    text = expand(sources / "main.c")
    assert [text.count(line) for line in ("struct deep", "int left;", "int right;", "int main;")] == [1] * 4
    assert (
        text.index("struct deep")
        < text.index("int left;")
        < text.index("int right;")
        < text.index("int main;")
    )
    assert "#include <linux/bpf.h>" in text
    assert '#include "' not in text
    assert "#pragma once" not in text


def test_sources_that_are_compiled_together_share_the_headers(sources: Path) -> None:
    (sources / "other.c").write_text('#include "right.h"\n#include "own.h"\nint other;\n')
    (sources / "own.h").write_text("int own;\n")
    text = expand(sources / "main.c", sources / "other.c")
    assert [text.count(line) for line in ("struct deep", "int right;", "int own;", "int other;")] == [1] * 4
    lines = {line: (file, number) for file, number, line in origins(text) if line}
    assert lines["int end;"] == ("main.c", 6)
    assert lines["int other;"] == ("other.c", 3)


def test_line_directives_name_the_origin_of_every_line(sources: Path) -> None:
    lines = {line: (file, number) for file, number, line in origins(expand(sources / "main.c")) if line}
    assert lines == {
        "#include <linux/bpf.h>": ("main.c", 1),
        "struct deep {};": ("deep.h", 3),
        "int left;": ("left.h", 3),
        "/* a comment */": ("right.h", 1),
        "int right;": ("right.h", 4),
        "int main;": ("main.c", 4),
        "int end;": ("main.c", 6),
    }


def test_line_directives_name_the_origin_of_every_line_of_the_real_programs() -> None:
    files = {path.name: path.read_text().splitlines() for path in SOURCES.glob("*.[ch]")}
    found = origins(expand(SOURCES / "connect.c", SOURCES / "tc.c", SOURCES / "xdp.c"))
    assert {file for file, _, _ in found} == files.keys()
    for file, number, line in found:
        original = files[file][number - 1]
        assert line == ("" if original == "#pragma once" else original)


def test_a_header_that_is_missing_is_named(sources: Path) -> None:
    (sources / "deep.h").unlink()
    with pytest.raises(FileNotFoundError, match=r"deep\.h"):
        expand(sources / "main.c")


def compile_connect() -> None:
    compile_sources([SOURCES / "connect.c"], {})


def test_without_bcc_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bcc.py").write_text("raise ImportError('No module named bcc')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(REPOSITORY))))
    with pytest.raises(Unsupported) as caught:
        compile_connect()
    assert "cannot import bcc" in caught.value.message
    assert "python3-bpfcc" in caught.value.hint
    assert "--system-site-packages" in caught.value.hint


def test_pypis_bcc_is_detected_as_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bcc of PyPI is a lattice library."""
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc" / "__init__.py").write_text("def make_lattice(): ...\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(REPOSITORY))))
    with pytest.raises(Unsupported) as caught:
        compile_connect()
    assert "PyPI's bcc, an unrelated package: remove it" in caught.value.message
    assert str(tmp_path / "bcc") in caught.value.message
    assert "python3-bpfcc" in caught.value.hint


def test_a_compiler_that_is_killed_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, for want of memory."""
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(Rejected, match=r"connect\.c: the compiler returned -9"):
        compile_connect()


def test_the_parent_does_not_import_bcc() -> None:
    """75 MB of an agent that lives for months."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, ebpfproxy.backends.ebpf.backend as _; print('bcc' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.strip().lower()) is False


def test_sources_can_be_copied_elsewhere(tmp_path: Path) -> None:
    """As into a wheel: nothing in them depends on where they are."""
    shutil.copytree(SOURCES, tmp_path / "bpf")
    assert expand(tmp_path / "bpf" / "connect.c") == expand(SOURCES / "connect.c")


def test_the_compiler_does_not_begin_if_its_parent_has_ended(sources: Path) -> None:
    """A test failed because the agent was killed before the compiler asked to end with it."""
    request = json.dumps({"sources": [str(sources / "main.c")], "defines": {}})
    other = str(os.getppid())  # not the parent of the compiler
    command = [sys.executable, "-m", "ebpfproxy.linux.bpf.compiler", other]
    done = subprocess.run(command, input=request.encode(), capture_output=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
