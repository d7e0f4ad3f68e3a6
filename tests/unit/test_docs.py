"""The documentation: generated files are current, links lead somewhere, commands and flags exist."""

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from ebpfproxy.cli import COMMANDS, group

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")])
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|srcset=\"([^\"]+)\"|src=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?<!kubectl)(?:^|[\s`])ebpfproxy ([a-z]+)((?: +[^\s`|;&)]+)*)")
LEVELS = ("debug", "info", "warning", "error")
FLAG = re.compile(r"(?:^| )(--[a-z][a-z0-9-]*)")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


STALE = """
import runpy
files = runpy.run_path("docs/generate.py")["files"]()
print(*(path.name for path, text in files.items() if path.read_text() != text))
"""


def test_generated_files_are_current() -> None:
    """In a process of its own: click keeps the first form of each help option, and other tests parse commands
    without the group, which has `-h`."""
    done = subprocess.run(
        [sys.executable, "-c", STALE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert not done.stdout.split(), "run `make docs-generate`"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, a hyphen for each space.

    The `slugify` of mkdocs.yml has the same rule for the site.
    """
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


def test_log_messages_are_constants_that_say_what_they_mean() -> None:
    """docs/generate.py fails where a constant has no docstring, and ignores a message that is no constant."""
    literal = []
    for path in (ROOT / "ebpfproxy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="log" | "_log"), attr=level), args=[first, *_]
                ):
                    if level in LEVELS and not isinstance(first, ast.Name):
                        literal.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not literal


def test_log_messages_are_clauses_in_sentence_case() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "log-messages.md").read_text(), re.MULTILINE)
    assert len(rows) > 50
    assert not [row for row in rows if row[0].islower() or row.endswith(".")]


@by_page
def test_messages_that_are_shown_exist(page: Path) -> None:
    """A text in backquotes that begins like a message has to be one."""
    known = (ROOT / "docs" / "log-messages.md").read_text()
    shown = re.findall(
        r"`((?:Cannot|Failed to|Removed|Switch|Sync|Repaired|API server)[a-z]* [^`]*)`", page.read_text()
    )
    assert not [text for text in shown if f"`{re.split(r' [a-z_]+=', text)[0]}`" not in known]


def test_every_page_is_in_the_sites_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text() + (ROOT / "docs" / "decisions" / "index.md").read_text()
    pages = [page for page in PAGES if ROOT / "docs" in page.parents]
    names = [
        page.name if "decisions" in page.parts else str(page.relative_to(ROOT / "docs")) for page in pages
    ]
    assert not [name for name in names if name not in listed]


def test_each_attempt_of_the_threat_model_has_a_test_or_says_none() -> None:
    page = (ROOT / "docs" / "threat-model.md").read_text()
    tables = re.findall(r"^\| attempt \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    tests = [row.removesuffix(" |").rpartition("| ")[2] for row in rows]
    assert len(tests) > 40
    assert not [row for row, test in zip(rows, tests, strict=True) if not re.match(r"\[|none", test)]


@pytest.mark.parametrize("page", ["benchmarks/modes.md", "benchmarks.md", "dataplanes/README.md"])
def test_images_in_html_are_found_from_the_pages_folder_on_the_site(page: str) -> None:
    """The site has BENCHMARKS/MODES/index.html for BENCHMARKS/MODES.md, and the files of docs/images."""
    docs = ROOT / "docs"
    hook = runpy.run_path(str(docs / "site.py"))["on_page_markdown"]
    is_index = page.endswith("README.md")
    folder = (docs / page).parent if is_index else (docs / page).with_suffix("")
    image = os.path.relpath(docs / "images" / "paths-light.svg", (docs / page).parent)
    text = hook(
        f'{(docs / page).read_text()}<img src="{image}"><img src="https://example.com/other.svg">',
        SimpleNamespace(file=SimpleNamespace(src_uri=page), is_index=is_index),
    )
    *images, other = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert other == "https://example.com/other.svg"
    assert images
    assert not [image for image in images if not Path(os.path.normpath(folder / image)).is_file()]
