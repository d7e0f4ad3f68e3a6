"""Output of commands: whether it has colors, how wide it is, and the progress of what takes long.

Colors and progress are for terminals only. The environment variable NO_COLOR (https://no-color.org) and
TERM=dumb switch off colors and all other text attributes.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console


class Steps(Protocol):
    """Shows the step that begins. `done`: the part of the command before it, 0 to 1; None if unknown."""

    def __call__(self, text: str, done: float | None = None, /) -> None: ...


_DUMB = ("dumb", "unknown")


def has_colors(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether output to this stream has colors and other text attributes."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM", "") not in _DUMB


def console(*, piped_width: int | None = None, stderr: bool = False, markup: bool = False) -> "Console":
    """Return a console for standard output or standard error.

    `piped_width` is the number of columns if the stream is no terminal; None means that of rich. `markup`:
    whether text in brackets is a style. An IPv6 address in brackets looks like it.
    """
    from rich.console import Console

    class Output(Console):
        """A console that leaves closed output to `cli.main`: rich would end the process with 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return Output(
        stderr=stderr,
        width=None if terminal else piped_width,
        # Explicit, because rich also colors a pipe if FORCE_COLOR is set, and keeps bold text with NO_COLOR.
        force_terminal=terminal,
        color_system="auto" if has_colors(stream) else None,
        highlight=False,
        markup=markup,
        emoji=False,
    )


@contextlib.contextmanager
def progress(activity: str) -> Iterator[None]:
    """Show `activity` and the time that it takes, while the context is entered.

    The line is on standard error, and disappears at the end. If that is no terminal, there is no output.
    Do not print to standard output in the context.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # By default rich diverts standard output to its console, here standard error.
    with Progress(*columns, console=console(stderr=True), transient=True, redirect_stdout=False) as shown:
        shown.add_task(activity, total=None)
        yield


@contextlib.contextmanager
def steps() -> Iterator[Steps]:
    """Show the steps of a command of some minutes on standard error, one line each.

    On a terminal, a bar below them shows the remaining time. It changes only with a step: a thread that draws
    it would take time from what a benchmark measures.
    """
    if not sys.stderr.isatty():
        yield lambda text, done=None, /: click.echo(text, err=True)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    began = time.monotonic()
    with Progress(
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        console=console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as shown:
        bar = shown.add_task("", total=1.0)

        def show(text: str, done: float | None = None, /) -> None:
            shown.console.print(text, markup=False)
            if done is not None:
                remaining = _remaining(time.monotonic() - began, done)
                shown.update(bar, completed=done, description=remaining, refresh=True)

        yield show


def _remaining(seconds: float, done: float) -> str:
    """Say how long the rest takes if the part `done` took so many seconds; "" if nothing is done.

    >>> _remaining(10.0, 0.25), _remaining(60.0, 0.25), _remaining(5.0, 0.0)
    ('about 30 s left', 'about 3 min left', '')
    """
    if done <= 0:
        return ""
    rest = seconds / done - seconds
    return f"about {rest / 60:.0f} min left" if rest > 90 else f"about {rest:.0f} s left"
