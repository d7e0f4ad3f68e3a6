"""The documentation: generated files are current, links lead somewhere, commands and flags exist."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ebpfproxy.cli import COMMANDS, group

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")])
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|srcset=\"([^\"]+)\"|src=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[\s`])ebpfproxy ([a-z]+)((?: +[^\s`|;&)]+)*)")
FLAG = re.compile(r"(?:^| )(--[a-z][a-z0-9-]*)")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_generated_files_are_current() -> None:
    files = runpy.run_path(str(ROOT / "docs" / "generate.py"))["files"]()
    stale = [path.name for path, text in files.items() if path.read_text() != text]
    assert not stale, "run `make docs-generate`"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, hyphens for spaces."""
    text = FENCE.sub("", page.read_text())
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(text)
    }


@by_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for found in LINK.findall(FENCE.sub("", page.read_text())):
        link = next(filter(None, found))
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def commands(text: str) -> Iterator[tuple[str, str]]:
    for match in COMMAND.finditer(text):
        if match[1] in COMMANDS:
            yield match[1], match[2]


def flags_of(command: click.Command) -> set[str]:
    known = {text for each in command.params for text in (*each.opts, *each.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below
            known |= flags_of(below)
    return known


@by_page
def test_commands_have_the_flags_that_are_shown(page: Path) -> None:
    unknown = []
    context = click.Context(group)
    for name, arguments in commands(page.read_text()):
        command = group.get_command(context, name)
        assert command
        unknown += [
            f"{name} {flag}" for flag in FLAG.findall(arguments) if flag not in flags_of(command) | {"--help"}
        ]
    assert not unknown
