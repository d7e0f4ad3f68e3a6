"""The options that benchmarks share."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ebpfproxy.bench import churn, modes, source

F = TypeVar("F", bound=Callable[..., Any])

_MODES_HELP = (
    f"Modes to compare, separated by commas: {', '.join(modes.NAMES)}. Each mode has its own testbed."
)


def numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    """Parse positive numbers, separated by commas. Raises click.BadParameter."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter("must be numbers, separated by commas") from None
    if min(numbers) < 1:
        raise click.BadParameter("each number must be at least 1")
    return numbers


def _words(known: tuple[str, ...], text: str) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in known:
            raise click.BadParameter(f"{word!r} is not one of {', '.join(known)}")
    return words


def _names(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    return _words(modes.NAMES, text)


def _different_names(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    return different_words(modes.NAMES, text)


def different_words(known: tuple[str, ...], text: str) -> list[str]:
    """Parse words of `known`, separated by commas, each at most once. Raises click.BadParameter."""
    names = _words(known, text)
    if len(set(names)) < len(names):
        raise click.BadParameter("each can be named only once")
    return names


def _complete_words(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return the completion of the last of several words that are separated by commas."""

    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + word for word in known if word.startswith(last)]

    return complete


def _clients(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    return _words(churn.CLIENTS, text)


def count(name: str, default: int, text: str) -> Callable[[F], F]:
    """An option that is a number, at least 1."""
    return click.option(name, type=click.IntRange(1), default=default, show_default=True, help=text)


def seconds(name: str, default: float, text: str, least: float = 0.0) -> Callable[[F], F]:
    return click.option(name, type=click.FloatRange(least), default=default, show_default=True, help=text)


def services(default: str) -> Callable[[F], F]:
    return click.option(
        "--services",
        callback=numbers,
        default=default,
        show_default=True,
        metavar="N[,N...]",
        help="Number of Services. Several numbers: one run for each.",
    )


def samples(default: int) -> Callable[[F], F]:
    return count("--samples", default, "Samples for each path and metric, over all rounds.")


def rounds(default: int) -> Callable[[F], F]:
    return count("--rounds", default, "Rounds. All modes are measured in each round, in turns.")


def megabytes(default: int = 256) -> Callable[[F], F]:
    return count("--megabytes", default, "Size of one TCP stream, in MiB.")


endpoints = count("--endpoints", 10, "Endpoints of each Service.")
objects = click.option(
    "--source",
    type=click.Choice(source.NAMES),
    default=source.MANIFESTS,
    show_default=True,
    help="Where the agent gets objects from: a folder of manifests, or an API server in the testbed.",
)
compared = click.option(
    "--modes",
    "modes",
    callback=_different_names,
    shell_complete=_complete_words(modes.NAMES),
    default=modes.EBPF,
    show_default=True,
    metavar="MODE[,MODE...]",
    help=_MODES_HELP,
)
in_sequence = click.option(
    "--modes",
    "modes",
    callback=_names,
    shell_complete=_complete_words(modes.NAMES),
    default=modes.EBPF,
    show_default=True,
    metavar="MODE[,MODE...]",
    help=f"Modes, separated by commas: {', '.join(modes.NAMES)}. With --switch-s one run that switches "
    "between them, otherwise one run for each.",
)
clients = click.option(
    "--from",
    "clients",
    callback=_clients,
    shell_complete=_complete_words(churn.CLIENTS),
    default=",".join(churn.CLIENTS[:2]),
    show_default=True,
    metavar="CLIENT[,CLIENT...]",
    help="Clients: pod and node connect to the ClusterIP, outside to the NodePort.",
)
output = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Format of the result.",
)
