"""``ebpfproxy verify``: compares the kernel with what the state of the cluster requires."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ebpfproxy.cli.dump_source import compared, from_dump_option
from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.service_names import complete_service
from ebpfproxy.config import Config, FlagsCommand, config_options
from ebpfproxy.errors import ConfigError

if TYPE_CHECKING:
    from ebpfproxy.diagnose.canary.result import Result
    from ebpfproxy.diagnose.verify import Inspectable

_DIFFERENT = 1
_ANY = "*"


@click.command(
    "verify",
    cls=FlagsCommand,
    epilog=examples("""
    # Compare the kernel with the cluster, with the agent's flags.
    ebpfproxy verify --kubeconfig=/etc/kubernetes/admin.conf
    # For scripts, with a folder of manifests.
    ebpfproxy verify --manifests=/etc/ebpfproxy/manifests -o json
    # Connect once by each path of this node, too.
    ebpfproxy verify --config=/etc/ebpfproxy/config.conf --canary
    # Compare a saved dump with manifests, on any machine.
    ebpfproxy verify --from-dump=node1.json --manifests=/etc/ebpfproxy/manifests
    """),
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
@click.option(
    "--canary",
    "canaries",
    is_flag=False,
    flag_value=_ANY,
    multiple=True,
    metavar="[SERVICE]",
    shell_complete=complete_service,
    help="Also make a connection by each path of this node: from the node, from a pod, and as a client "
    "outside at each uplink. SERVICE, such as prod/web:https, selects a Service; it can be given several "
    "times. Default: TCP connections to any Services, which are closed at once.",
)
@from_dump_option
@config_options
def command(config: Config, output: str, canaries: tuple[str, ...], from_dump: Path | None) -> int:
    """Compare the kernel with the Services and EndpointSlices of the cluster, in the mode that serves here.

    Prints one line for each difference: the object, what is wrong with it, and the two values. Only
    differences that last longer than a sync are printed. Changes nothing, and works with and without a
    running agent. Run it with the agent's flags, and in the agent's namespaces or pod.

    It names rules of other programs that drop packets from outside to endpoints; they are no difference. In
    mode ebpf, it also checks that the programs are attached, are in effect, and run before programs of
    others. The exit code is 0 without differences, 1 with differences or if a path fails, and another one if
    the comparison is not possible.
    """
    if canaries and from_dump:
        raise ConfigError("cannot combine --canary with --from-dump", "leave --from-dump or --canary out")
    mode, result = compared(config, from_dump)
    connections = _connections(mode, config, canaries) if canaries else None
    dropping = "" if from_dump else _dropping(config, mode.name)
    if output == "json":
        found = [each._asdict() for each in result.differences]
        content: dict[str, object] = {"mode": mode.name, "compared": result.compared, "differences": found}
        if dropping:
            content["firewall"] = dropping
        if connections is not None:
            content["canary"] = list(map(_as_json, connections))
        click.echo(json.dumps(content, indent=2))
    else:
        for line in (*result.differences, *(connections or ())):
            click.echo(line)
        count = len(result.differences)
        summary = f"{count} difference{'' if count == 1 else 's'}" if count else "no differences"
        click.echo(f"mode {mode.name}: {summary} in {result.compared} entries")
        if dropping:
            click.echo(f"firewall: {dropping}")
        if connections is not None:
            click.echo(f"canary: {_summary(connections)}")
    works = connections is None or _works(connections)
    return _DIFFERENT if result.differences or not works else 0


def _dropping(config: Config, mode: str) -> str:
    from ebpfproxy.backends import firewall_checks

    return str(firewall_checks.dropping(config, mode) or "")


def _connections(mode: "Inspectable", config: Config, canaries: tuple[str, ...]) -> "list[Result]":
    """Raises ConfigError for a value that is no Service."""
    from ebpfproxy.diagnose.canary.canary import canary
    from ebpfproxy.diagnose.explain.destination import parse

    named = [parse(each) for each in canaries if each != _ANY]
    if any(each.service is None or each.echo for each in named):
        raise ConfigError("--canary: connections need a Service", "write it as prod/web or prod/web:https")
    return canary(mode, config, named)


def _as_json(result: "Result") -> dict[str, object]:
    return {**result._asdict(), "destination": str(result.destination), "state": result.state.value}


def _summary(results: "list[Result]") -> str:
    """For example "5 paths: 4 work, 0 fail, 1 unproven"."""
    states = [each.state.value for each in results]
    counts = (states.count(each) for each in ("works", "fails", "unproven"))
    return "{}: {} work, {} fail, {} unproven".format(
        f"{len(states)} path{'' if len(states) == 1 else 's'}", *counts
    )


def _works(results: "list[Result]") -> bool:
    """Whether no path fails, and at least one is proven."""
    states = {each.state.value for each in results}
    return "works" in states and "fails" not in states
