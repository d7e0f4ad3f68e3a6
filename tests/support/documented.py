"""Finds the commands that the documents and the help show, and the results that they show for them."""

import functools
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from ebpfproxy.cli import group
from ebpfproxy.cli.epilog import examples_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md", "vagrant/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
PLUGIN = ROOT / "deploy" / "kubectl" / "kubectl-ebpfproxy"

SHELL = ("sh", "bash", "console", "")
"""Languages of fenced blocks that may hold commands."""
PROGRAMS = frozenset(
    """
    apt-get bash bpftool buildah cat conntrack cp curl docker ebpfproxy echo env for git grep ip ip6tables
    ip6tables-save ipset iptables iptables-legacy-save iptables-nft-save iptables-save ipvsadm journalctl k3s
    kill kubeadm kubectl ls make mkdir modprobe nft pip python python3 readlink sed sh ss sysctl systemctl tc
    uname vagrant
    """.split()  # noqa: SIM905
)
"""Text in backquotes that begins with one of these and has more words is a command."""
_NO_COMMAND = re.compile(r"ip6? (?:kube-proxy|[sd]addr .*)|kill -9|nft list|nft -f -|pip install bcc")
"""Text in backquotes that names a table, or what a program does, rather than a command to type."""
_PROMPT = re.compile(r"^(?:\$|#|node#) +")
_NODE = re.compile(r"^node# +")
_FENCE = re.compile(r"^( *)```(\w*)")
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_COMMENT = re.compile(r"(?:^|\s)#(?:\s.*)?$")
_HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?")
_OPERATORS = {"|", "||", "&&", ";", "&", "(", ")", "|&"}


class Command(NamedTuple):
    """A command of a document, on one line; `line` is its number.

    `shown`: texts that the command prints, from the table's row or the next block; empty if there are none.
    """

    page: str
    line: int
    text: str
    shown: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


class _Block(NamedTuple):
    language: str
    first: int
    """The number of its first line, behind the fence."""
    lines: list[str]
    before: str
    """The text between the block before and this one."""


@functools.cache
def commands() -> tuple[Command, ...]:
    """All of them, in the order of the pages, then those of the help."""
    pages = ((str(page.relative_to(ROOT)), page.read_text()) for page in PAGES)
    return (*(command for name, text in pages for command in in_page(name, text)), *in_help())


@functools.cache
def in_help() -> tuple[Command, ...]:
    """The examples in the help of the commands, and of the plugin of kubectl. The page is the command that
    shows the help."""
    helps = [(name, examples_of(command)) for name, command in commands_below("ebpfproxy", group)]
    plugin = subprocess.run([PLUGIN, "--help"], capture_output=True, text=True, check=True).stdout
    section = plugin.partition("\nExamples:\n")[2].partition("\n\n")[0]
    return tuple(
        Command(f"{name} --help", line, text)
        for name, lines in (*helps, ("kubectl ebpfproxy", section.splitlines()))
        for line, text in _block_commands(_Block("sh", 1, lines, ""))
    )


def commands_below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Each command with its complete name, including the groups, in the order of the help."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            if (below := command.get_command(context, word)) and not below.hidden:
                yield from commands_below(f"{name} {word}", below)


def in_page(page: str, text: str) -> Iterator[Command]:
    """
    >>> for each in in_page("a.md", "`make x`\\n```sh\\nls  # all\\n```\\nExpected:\\n```text\\na\\n```"):
    ...     print(each.line, each.text, each.shown)
    1 make x ()
    3 ls ('a',)
    """
    blocks, prose = _split(text)
    for line, row, shown in _prose_rows(prose):
        for code in _CODE.findall(row):
            command = _PROMPT.sub("", code.replace("\\|", "|")).removeprefix("sudo ")
            if is_command(command):
                yield Command(page, line, command, shown)
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        if block.language not in SHELL:
            continue
        found = [each for each in _block_commands(block) if block.language or is_command(each[1])]
        shown = _results(after)
        for number, (line, command) in enumerate(found, 1):
            yield Command(page, line, command, shown if number == len(found) else ())


def shell_blocks(page: str) -> list[tuple[str, tuple[str, ...]]]:
    """The shell blocks of a page, each as it is, with the lines of the block of results behind it."""
    blocks, _ = _split((ROOT / page).read_text())
    return [
        ("\n".join(block.lines) + "\n", _results(after))
        for block, after in itertools.zip_longest(blocks, blocks[1:])
        if block.language == "sh"
    ]


def is_command(text: str) -> bool:
    """
    >>> is_command("make setup"), is_command("iptables"), is_command("ip kube-proxy")
    (True, False, False)
    """
    words = text.removeprefix("sudo ").split()
    if len(words) < 2 or _NO_COMMAND.fullmatch(text):
        return False
    return words[0].removeprefix(".venv/bin/") in PROGRAMS


def simple_commands(text: str) -> list[list[str]]:
    """The words of each command of a pipe or a list, without redirections to a file. Raises ValueError where
    quotes are not closed.

    >>> simple_commands("sudo a -x 'b c' | d; e >/tmp/f")
    [['a', '-x', 'b c'], ['d'], ['e']]
    >>> simple_commands("a > f")
    [['a']]
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in _OPERATORS:
            found.append([])
        elif word == ">":
            next(words, "")
        elif word != "sudo" and not re.match(r">[\w/]", word):
            found[-1].append(word)
    return [words for words in found if words]


def _results(block: _Block | None) -> tuple[str, ...]:
    """The lines of a block that shows what the command in front of it writes."""
    if not block or block.language != "text" or "Expected" not in block.before or "\n#" in block.before:
        return ()
    return tuple(line for line in block.lines if line.strip())


def _split(text: str) -> tuple[list[_Block], list[str]]:
    """The blocks, and the lines outside of them, with empty ones in place of the blocks' lines."""
    blocks: list[_Block] = []
    prose: list[str] = []
    before: list[str] = []
    inside: _Block | None = None
    indent = 0
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if inside and fence:
            inside, before = None, []
        elif inside:
            inside.lines.append(line[indent:])
        elif fence:
            indent = len(fence[1])
            inside = _Block(fence[2], number + 1, [], "\n".join(before))
            blocks.append(inside)
        else:
            before.append(line)
        prose.append("" if inside or fence else line)
    return blocks, prose


def _prose_rows(prose: Sequence[str]) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Each line with its number; of a table with commands and expected results, only the commands' column,
    and the results in backquotes."""
    columns: tuple[int, int] | None = None
    for number, line in enumerate(prose, 1):
        if not line.lstrip().startswith("|"):
            columns = None
            yield number, line, ()
            continue
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        names = [cell.strip().partition(",")[0] for cell in cells]
        results = [names.index(name) for name in ("expected result", "expected") if name in names]
        if results:
            columns = results[0], next(n for n, name in enumerate(names) if name in ("command", "check"))
        elif columns and len(cells) > max(columns):
            yield number, cells[columns[1]], tuple(_CODE.findall(cells[columns[0]]))
        else:
            yield number, line, ()


def _block_commands(block: _Block) -> Iterator[tuple[int, str]]:
    """Lines that are continued are joined, and a here document belongs to its command. In a block of the
    language console, only lines with a prompt are commands."""
    lines = iter(enumerate(block.lines, block.first))
    for number, line in lines:
        if block.language == "console" and not _PROMPT.match(line):
            continue
        prompt = _PROMPT if block.language != "sh" else _NODE
        text = _COMMENT.sub("", prompt.sub("", line.strip())).rstrip()
        while text.endswith("\\"):
            text = f"{text[:-1].rstrip()} {next(lines)[1].strip()}"
        if end := _HEREDOC.search(text):
            for _, inner in lines:
                if inner.strip() == end[1]:
                    break
        if text:
            yield number, text.removeprefix("sudo ")
