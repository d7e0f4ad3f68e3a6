"""The command line: `main`, and a module for each command, which has a click command named `command`.

Only this package prints and determines the exit code. A module is imported when its command runs, so that
``ebpfproxy version`` loads no large libraries.

No package imports this one, except `ebpfproxy.__main__`. This package may import all others.

Read first: this file, then `run.py`.
"""

import contextlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from ebpfproxy import __version__, log
from ebpfproxy.cli import pipe
from ebpfproxy.cli.epilog import exit_codes
from ebpfproxy.config.command import unknown_flag
from ebpfproxy.errors import CLOSED, EXIT_CODES, INTERRUPTED, ConfigError, EbpfProxyError, Rejected

COMMANDS = {
    "run": "Run the agent on this node.",
    "explain": "Show what this node does with a connection, and why.",
    "dump": "Show the content of the BPF maps, in mode ebpf.",
    "verify": "Compare the kernel with the state of the cluster.",
    "top": "Show the Services with the most new connections, in mode ebpf.",
    "monitor": "Show new connections as they happen, in mode ebpf.",
    "doctor": "Show what this node lacks, and which other programs interfere.",
    "support-bundle": "Write doctor, dump, versions and logs into one file, without secrets.",
    "cleanup": "Remove what ebpfproxy or kube-proxy created in the kernel.",
    "demo": "Run pods, a Service and the agent in namespaces of this machine.",
    "compile": "Compile the BPF programs for a package or an image.",
    "bench": "Measure connections, packets, starts and changes on this machine.",
    "completion": "Print the script that completes command lines in a shell.",
    "version": "Show the version.",
}
"""Each command and its summary in the list of commands."""

ENDED = "Ended because of an error"
"""The command `run` ends with an exit code that is not 0. `error` is the reason, and `hint` the remedy. An
error before the log format is known, for example an unknown flag, is printed as by the other commands."""

_TRACE_FROM = 4

COMPLETION_VARIABLE = "_EBPFPROXY_COMPLETE"
"""If this environment variable is set, click completes a command line instead of running a command."""


def module_of(command: str) -> str:
    """The module of a command in this package.

    >>> module_of("support-bundle")
    'support_bundle'
    """
    return command.replace("-", "_")


class _BrokenPipe(Exception):
    """A BrokenPipeError, which click would take for closed output, and end the process with 1."""


@contextlib.contextmanager
def _broken_pipes() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _BrokenPipe(str(error)) from error


class LazyGroup(click.Group):
    """A group that imports a command's file only when the command is used."""

    def make_context(self, *given: Any, **named: Any) -> click.Context:
        with _broken_pipes():
            return super().make_context(*given, **named)

    def invoke(self, ctx: click.Context) -> Any:
        with _broken_pipes():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises ConfigError for an unknown flag."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            rejection = unknown_flag(error)
            hint = rejection.hint or "put flags after the command, such as ebpfproxy run --proxy-mode=ebpf"
            raise ConfigError(rejection.message, hint) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ebpfproxy.cli.{module_of(cmd_name)}").command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command or an option. Click's method would import every command."""
        options = click.Command.shell_complete(self, ctx, incomplete)
        commands = [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*commands, *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"ebpfproxy COMMAND --help shows the flags of a command.\n\n{exit_codes(EXIT_CODES)}",
)
@click.version_option(__version__, message="ebpfproxy %(version)s")
def group() -> None:
    """An eBPF-based replacement for kube-proxy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, the default being those of the process; return the exit code.

    An expected error prints one line with a hint and has its own exit code (`ebpfproxy.errors`). The exit
    code of an unexpected error is 1, that of an interrupt 130, and 141 if nothing reads the output any more.
    From ``-v=4`` on, errors print a traceback. If the command logs, the error is logged instead.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if COMPLETION_VARIABLE in os.environ:
        importlib.import_module("ebpfproxy.cli.completion")  # its scripts set the variable
    try:
        code = group.main(words, prog_name="ebpfproxy", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, _BrokenPipe | BrokenPipeError) and pipe.is_closed():
            pipe.discard_output()
            return CLOSED
        return _report(error, _wants_trace(words))


def _report(error: Exception, trace: bool) -> int:
    """Log the error if the command logs, else print it to standard error; return the exit code."""
    if trace and not log.is_set_up():
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, PermissionError) and os.geteuid():  # root has permission
        subject = error.filename or "a kernel interface"
        error = Rejected(f"cannot access {subject}: {error.strerror}", "run as root")
    if isinstance(error, EbpfProxyError):
        _show(error.message, error.hint)
        return error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "ebpfproxy"
        _show(_error_style(error.format_message()), f"see {command} --help")
        return error.exit_code
    if isinstance(error, click.ClickException):
        _show(_error_style(error.format_message()))
        return error.exit_code
    advice = "" if trace else "; run again with -v=4 for the traceback"
    reason = " ".join(str(error).split())
    _show(f"internal error: {type(error).__name__}{': ' if reason else ''}{reason}{advice}")
    return 1


def _show(message: str, hint: str = "") -> None:
    if log.is_set_up():
        log.Logger(__name__).error(ENDED, error=message, **({"hint": hint} if hint else {}))
        return
    for line in message.splitlines():
        print(f"ebpfproxy: {line}", file=sys.stderr)
    for line in hint.splitlines():
        print(f"  hint: {line}", file=sys.stderr)


def _error_style(message: str) -> str:
    """Convert a sentence of click to the style of ebpfproxy's errors.

    >>> _error_style("No such command 'foo'.")
    "no such command 'foo'"
    """
    return (message[:1].lower() + message[1:]).rstrip(".")


def _wants_trace(words: Sequence[str]) -> bool:
    """Whether -v is 4 or more. Read without the parser, which may have raised the error.

    >>> _wants_trace(["run", "-v=4"]), _wants_trace(["run", "--v", "5"]), _wants_trace(["run", "-v3"])
    (True, True, False)
    """
    levels = re.findall(r"(?:^|\x00)(?:-v|--v(?=[=\x00]))[=\x00]?([0-9]+)(?=\x00|$)", "\x00".join(words))
    return bool(levels) and int(levels[-1]) >= _TRACE_FROM
