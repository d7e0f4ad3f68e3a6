"""Commands whose flags are typed as Go's are: `FlagsCommand`, and the decorators that give it options.

Click parses and writes the help; this file makes click options from the declarations of `Config`, and
brings Go's way of typing flags (spf13/pflag) into the one that click reads.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import click

from ebpfproxy.config.load import Loaded, load
from ebpfproxy.config.option import Option
from ebpfproxy.config.settings import OPTIONS, parse_some
from ebpfproxy.config.unsupported_flags import HINTS
from ebpfproxy.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class DeclaredOption(click.Option):
    """A click option made from a declaration. Click hands its text on as it is: what is wrong is reported in
    one message for all options, not for the first alone.
    """

    def __init__(self, param_decls: Sequence[str], *, declared: Option) -> None:
        super().__init__(param_decls, metavar=declared.kind.metavar, multiple=declared.kind.many)
        self.declared = declared

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        declared = self.declared
        names = ", ".join(declared.flags) + f" {declared.kind.metavar}".rstrip()
        default = "" if declared.default in (None, "", "false") else f" Default: {declared.default}."
        return names, declared.help + default


class FlagsCommand(click.Command):
    """A command that takes flags as a Go program does, and shows them in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises ConfigError for an unknown flag."""
        try:
            return super().parse_args(ctx, go_style(args, self.get_params(ctx)))
        except click.NoSuchOption as error:
            raise unknown_flag(error) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = param.declared.group.value if isinstance(param, DeclaredOption) else "Options"
                groups.setdefault(heading, []).append(record)
        # What is the command's own comes first, whatever order the decorators stood in.
        for heading in sorted(groups, key=lambda heading: heading != "Options"):
            with formatter.section(heading):
                formatter.write_dl(groups[heading], col_max=32)


def unknown_flag(error: click.NoSuchOption) -> ConfigError:
    """What to say about a flag that we have not."""
    hint = HINTS.get(error.option_name.replace("_", "-"), "")
    if not hint and error.possibilities:
        hint = f"did you mean {error.possibilities[0]}?"
    return ConfigError(f"unknown flag: {error.option_name}", hint)


def go_style(args: Sequence[str], params: Sequence[click.Parameter]) -> list[str]:
    """The arguments in the words that click understands: ``--flag value``, nothing glued together.

    ``_`` in the name of a flag is ``-``; a boolean flag alone is true and never takes the next word;
    what is not a known flag stays as it is, for click to complain about.
    """
    known = {name: p for p in params if isinstance(p, click.Option) for name in (*p.opts, *p.secondary_opts)}
    words: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            return [*words, arg, *rest]
        name, value = _split(arg)
        param = known.get(name)
        if param is None or param.is_flag:
            words.append(name if param and value is None else arg)
        elif value is not None:
            words += [name, value]
        elif isinstance(param, DeclaredOption) and param.declared.kind.boolean:
            words += [name, "true"]
        else:
            words += [name, *itertools.islice(rest, 1)]
    return words


def _split(arg: str) -> tuple[str, str | None]:
    """The name of a flag and the value glued to it, if one is.

    >>> _split("--sync_period=30s"), _split("-v=4"), _split("-v4"), _split("--cleanup"), _split("word")
    (('--sync-period', '30s'), ('-v', '4'), ('-v', '4'), ('--cleanup', None), ('word', None))
    """
    if arg.startswith("--"):
        name, equals, value = arg.partition("=")
        return name.replace("_", "-"), value if equals else None
    if arg.startswith("-") and len(arg) > 2:
        return arg[:2], arg[2:].removeprefix("=")
    return arg, None


def options(*names: str) -> Callable[[F], F]:
    """Give a command the options of these fields of `Config`; it gets their values by the same names."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(**given: Any) -> Any:
            texts = {name: given.pop(name) for name in names}
            return function(**given, **parse_some(texts, names))

        return cast(F, _with_options(run, names))

    return decorate


def config_options(function: F) -> F:
    """Give a command all options; it gets one argument, `config`."""
    return _with_all_options(function, lambda loaded: {"config": loaded.config})


def loaded_options(function: F) -> F:
    """As `config_options`, for a command that prints remarks: the argument is `loaded`."""
    return _with_all_options(function, lambda loaded: {"loaded": loaded})


def _with_all_options(function: F, arguments: Callable[[Loaded], dict[str, Any]]) -> F:
    @functools.wraps(function)
    def run(**given: Any) -> Any:
        texts = {name: given.pop(name) for name in OPTIONS}
        return function(**given, **arguments(load(texts)))

    return cast(F, _with_options(run, tuple(OPTIONS)))


def _with_options(run: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    for name in reversed(names):  # click shows the decorator that stands first, and so runs last, first
        declared = OPTIONS[name]
        run = click.option(*declared.flags, name, cls=DeclaredOption, declared=declared)(run)
    return run
