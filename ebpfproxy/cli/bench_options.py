"""The options that benchmarks share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ebpfproxy.bench import churn, modes

F = TypeVar("F", bound=Callable[..., Any])

_MODES_HELP = (
    f"Which modes to compare, with commas between them: {', '.join(modes.NAMES)}. Each has a lab of its own, "
    "and they take turns in each round."
)


def _numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter("numbers, with commas between them") from None
    if min(numbers) < 1:
        raise click.BadParameter("each at least 1")
    return numbers


def _words(known: tuple[str, ...], text: str) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in known:
            raise click.BadParameter(f"{word!r} is none of {', '.join(known)}")
    return words


def _names(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    return _words(modes.NAMES, text)


def _different_names(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    names = _words(modes.NAMES, text)
    if len(set(names)) < len(names):
        raise click.BadParameter("each mode once")
    return names


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
        callback=_numbers,
        default=default,
        show_default=True,
        metavar="N[,N...]",
        help="Sizes of the cluster, one after another.",
    )


def samples(default: int) -> Callable[[F], F]:
    return count("--samples", default, "Of each path and metric, in all rounds.")


def rounds(default: int) -> Callable[[F], F]:
    return count("--rounds", default, "In each, all modes take turns.")


def megabytes(default: int = 256) -> Callable[[F], F]:
    return count("--megabytes", default, "MiB of one stream of iperf3.")


endpoints = count("--endpoints", 10, "Of each Service.")
compared = click.option(
    "--modes",
    "modes",
    callback=_different_names,
    default=modes.EBPF,
    show_default=True,
    metavar="MODE[,MODE...]",
    help=_MODES_HELP,
)
in_sequence = click.option(
    "--modes",
    "modes",
    callback=_names,
    default=modes.EBPF,
    show_default=True,
    metavar="MODE[,MODE...]",
    help=f"One after another, with --move-s in one run, else each in its own: {', '.join(modes.NAMES)}.",
)
clients = click.option(
    "--from",
    "clients",
    callback=_clients,
    default=",".join(churn.CLIENTS[:2]),
    show_default=True,
    metavar="CLIENT[,CLIENT...]",
    help="pod, node, outside: the last one dials the NodePort.",
)
output = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
