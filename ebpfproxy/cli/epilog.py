"""The texts below the options in the help of a command: examples and exit codes.

Click wraps a paragraph of an epilog, unless its first line is ``\\b``.
"""

import textwrap
from collections.abc import Sequence

import click

from ebpfproxy.errors import ExitCode

_EXAMPLES = "\b\nExamples:\n"


def examples(text: str) -> str:
    """Return the paragraph with examples: lines of a shell, each command below a comment that explains it.

    Tests run these commands, as they run those of the documentation.
    """
    return _EXAMPLES + textwrap.indent(textwrap.dedent(text).strip(), "  ")


def examples_of(command: click.Command) -> list[str]:
    """Return the lines of the examples in the help of a command, without indentation; empty without any."""
    for paragraph in (command.epilog or "").split("\n\n"):
        if paragraph.startswith(_EXAMPLES):
            return textwrap.dedent(paragraph.removeprefix(_EXAMPLES)).splitlines()
    return []


def exit_codes(codes: Sequence[ExitCode]) -> str:
    """Return the paragraph with exit codes."""
    return "\b\nExit codes:\n" + "\n".join(f"  {each.code:<3}  {each.meaning}" for each in codes)
