"""The walkthrough "Your first change" of CONTRIBUTING.md, followed in a copy of the repository."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = re.search(
    r"^## Your first change.*?(?=^## )", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
)
assert SECTION
TEXT = re.sub(r"^   ", "", SECTION[0], flags=re.MULTILINE)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("ebpfproxy", "bpf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_change_applies_and_passes_the_checks(copy: Path) -> None:
    (diff,) = blocks("diff")
    old_file, new_file, removed, added = diff.splitlines()
    path = copy / new_file.removeprefix("+++ b/")
    assert old_file == f"--- a/{path.relative_to(copy)}"
    before = path.read_text()
    assert before.count(removed[1:] + "\n") == 1
    path.write_text(before.replace(removed[1:], added[1:]))
    for command in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "-q", path], cwd=copy, check=True)


def test_the_commands_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {f"make {target}" for target in targets}
    for line in "".join(blocks("sh")).splitlines():
        words = line.split()
        if words[0] == "make":
            assert line in known
        elif "pytest" in words:
            assert (ROOT / words[-1]).is_file()
        else:
            assert words[:2] == ["git", "commit"]
