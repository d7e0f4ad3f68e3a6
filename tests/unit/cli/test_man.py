"""The man page: complete, and valid for the programs that show it."""

import subprocess
from pathlib import Path

import click
import pytest

from ebpfproxy.cli import group
from ebpfproxy.cli.man import page
from ebpfproxy.config.command import option_groups
from ebpfproxy.errors import EXIT_CODES
from tests.support.documented import commands_below, in_help
from tests.support.missing import need


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("man") / "ebpfproxy.8"
    path.write_text(page(group))
    return path


def output(package: str, *command: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run a program of this Debian package."""
    need(str(command[0]), package)
    environment = {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "MANWIDTH": "1000",
        "MAN_KEEP_FORMATTING": "",
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_mandoc_accepts_the_page(source: Path) -> None:
    complaints = output("mandoc", "mandoc", "-Tlint", "-Wwarning", source).stdout.splitlines()
    # A date would differ with each build.
    assert not [line for line in complaints if "missing date" not in line]


def test_groff_accepts_the_page(source: Path) -> None:
    done = output("groff-base", "groff", "-man", "-ww", "-z", "-Kutf8", "-Tutf8", source)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_shows_every_command_option_example_and_exit_code(source: Path) -> None:
    shown = output("man-db", "man", "-l", source).stdout
    rows = {" ".join(line.split()) for line in shown.splitlines()}
    context = click.Context(group, info_name="ebpfproxy", **group.context_settings)
    for name, command in commands_below("ebpfproxy", group):
        if command is group:
            continue
        assert any(row.startswith(f"{name} ") for row in rows), name
        inner = click.Context(command, info_name=command.name, parent=context)
        for records in option_groups(command, inner).values():
            for term, _ in records:
                assert any(row.startswith(term) for row in rows), (name, term)
    for example in in_help():
        if example.page.startswith("ebpfproxy "):
            assert example.text in rows
    for each in EXIT_CODES:
        assert any(row.startswith(f"{each.code} {each.meaning[:1].upper()}") for row in rows), each
