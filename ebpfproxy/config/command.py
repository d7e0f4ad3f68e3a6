"""Commands with the flag syntax of Go: `FlagsCommand`, and decorators that add options of `Config`.

This module makes click options from the declarations of `Config`, and converts Go's flag syntax (spf13/pflag)
to that of click. Click parses the flags and writes the help.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from ebpfproxy.config import handover
from ebpfproxy.config.load import Loaded, Remark, load_after
from ebpfproxy.config.option import Option
from ebpfproxy.config.settings import OPTIONS, parse_some
from ebpfproxy.config.unsupported_flags import HINTS, WITHOUT_EFFECT
from ebpfproxy.errors import ConfigError

FLAGS_WITHOUT_EFFECT = "Ignoring flags of kube-proxy that have no effect"
"""The command line can be that of kube-proxy. `flags` have no effect in ebpfproxy; their values are not
checked."""

_IGNORED = "ebpfproxy.ignored_flags"

F = TypeVar("F", bound=Callable[..., Any])


class DeclaredOption(click.Option):
    """A click option made from a declaration.

    Click passes its text on unchecked, so that one error reports all invalid options, not only the first.
    """

    def __init__(self, param_decls: Sequence[str], *, declared: Option) -> None:
        kind = declared.kind
        super().__init__(param_decls, metavar=kind.metavar, multiple=kind.many, help=declared.help)
        self.declared = declared

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        declared = self.declared
        names = ", ".join(declared.flags) + f" {declared.kind.metavar}".rstrip()
        default = "" if declared.default in (None, "", "false") else f" Default: {declared.default}."
        return names, declared.help + default

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        kind = self.declared.kind
        if kind.path:
            return [CompletionItem(incomplete, type=kind.path)]
        return [CompletionItem(word) for word in kind.words if word.startswith(incomplete)]


class BooleanOption(click.Option):
    """An option with the syntax of Go's booleans: without a value it is true."""


class IgnoredOption(click.Option):
    """A flag of kube-proxy without effect. It is not in the help. Its name is recorded if it is given."""

    def __init__(self, param_decls: Sequence[str], *, boolean: bool) -> None:
        super().__init__(param_decls, multiple=True, hidden=True, expose_value=False, callback=_record)
        self.boolean = boolean


def _record(context: click.Context, option: click.Parameter, values: Sequence[str]) -> None:
    if values:
        context.meta.setdefault(_IGNORED, []).append(option.opts[0])


class FlagsCommand(click.Command):
    """A command with Go's flag syntax. The help shows the flags in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises ConfigError for an unknown flag."""
        try:
            return super().parse_args(ctx, go_style(args, self.get_params(ctx)))
        except click.NoSuchOption as error:
            rejection = unknown_flag(error)
            hint = rejection.hint or f"list the flags with {ctx.command_path} --help"
            raise ConfigError(rejection.message, hint) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, records in option_groups(self, ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=32)


def option_groups(command: click.Command, context: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return names and help of the options that the help shows, by heading, in order."""
    groups: dict[str, list[tuple[str, str]]] = {"Options": []}  # those of the command itself come first
    for param in command.get_params(context):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None:
            heading = param.declared.group.value if isinstance(param, DeclaredOption) else "Options"
            groups.setdefault(heading, []).append(record)
    return groups


def unknown_flag(error: click.NoSuchOption) -> ConfigError:
    """Return the error for an unknown flag. The hint is "" if there is no similar flag."""
    hint = HINTS.get(error.option_name.replace("_", "-"), "")
    if not hint and error.possibilities:
        hint = f"did you mean {error.possibilities[0]}?"
    return ConfigError(f"unknown flag: {error.option_name}", hint)


def go_style(args: Sequence[str], params: Sequence[click.Parameter]) -> list[str]:
    """Convert arguments from Go's syntax to that of click: ``--flag=value`` becomes ``--flag value``.

    ``_`` in the name of a flag means ``-``. A boolean flag without ``=`` is true and never takes the next
    word. Unknown flags stay as they are, so that click reports them.
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
        elif _is_boolean(param):
            words += [name, "true"]
        else:
            words += [name, *itertools.islice(rest, 1)]
    return words


def _is_boolean(option: click.Option) -> bool:
    if isinstance(option, IgnoredOption):
        return option.boolean
    if isinstance(option, BooleanOption):
        return True
    return isinstance(option, DeclaredOption) and option.declared.kind.boolean


def _split(arg: str) -> tuple[str, str | None]:
    """Return the name of a flag and the value attached to it; None without one.

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
    """Add the options of these fields of `Config` to a command. It gets their values under the same names."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(**given: Any) -> Any:
            texts = {name: given.pop(name) for name in names}
            return function(**given, **parse_some(texts, names))

        return cast(F, _with_options(run, names))

    return decorate


def config_options(function: F) -> F:
    """Add all options to a command. It gets one argument, `config`."""
    return _with_all_options(function, lambda loaded: {"config": loaded.config})


def loaded_options(function: F) -> F:
    """Add all options to a command that logs remarks. It gets one argument, `loaded`."""
    return _with_all_options(function, lambda loaded: {"loaded": loaded})


def _with_all_options(function: F, arguments: Callable[[Loaded], dict[str, Any]]) -> F:
    @functools.wraps(function)
    def run(**given: Any) -> Any:
        texts = {name: given.pop(name) for name in OPTIONS}
        loaded = load_after(texts, handover.take())
        ignored = click.get_current_context().meta.get(_IGNORED)
        if ignored:
            remark = Remark(FLAGS_WITHOUT_EFFECT, {"flags": ", ".join(ignored)})
            loaded = dataclasses.replace(loaded, remarks=(*loaded.remarks, remark))
        return function(**given, **arguments(loaded))

    command = _with_options(run, tuple(OPTIONS))
    for flag, boolean in WITHOUT_EFFECT.items():
        command = click.option(flag, cls=IgnoredOption, boolean=boolean)(command)
    return cast(F, command)


def _with_options(run: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    for name in reversed(names):  # the help lists options in reverse order of the decorators' execution
        declared = OPTIONS[name]
        run = click.option(*declared.flags, name, cls=DeclaredOption, declared=declared)(run)
    return run
