"""``ebpfproxy verify``: compares the kernel with what the state of the cluster requires."""

import json

import click

from ebpfproxy import log
from ebpfproxy.cli.epilog import examples
from ebpfproxy.config import Config, FlagsCommand, config_options

_DIFFERENT = 1


@click.command(
    "verify",
    cls=FlagsCommand,
    epilog=examples("""
    # Compare the kernel with the cluster, with the agent's flags.
    ebpfproxy verify --kubeconfig=/etc/kubernetes/admin.conf
    # For scripts, with a folder of manifests.
    ebpfproxy verify --manifests=/etc/ebpfproxy/manifests -o json
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
@config_options
def command(config: Config, output: str) -> int:
    """Compare the kernel with the Services and EndpointSlices of the cluster, in the mode that serves here.

    Prints one line for each difference: the object, what is wrong with it, and the two values. Only
    differences that last longer than a sync are printed. Changes nothing, and works with and without a
    running agent. Run it with the agent's flags, and in the agent's namespaces or pod.

    In mode ebpf, it also checks that the programs are attached, are in effect, and run before programs of
    others. The exit code is 0 without differences, 1 with differences, and another one if the comparison is
    not possible.
    """
    from ebpfproxy.diagnose.mode_in_use import mode_in_use
    from ebpfproxy.diagnose.verify import verify

    log.silence()
    mode = mode_in_use(config)
    result = verify(mode, config)
    if output == "json":
        found = [each._asdict() for each in result.differences]
        click.echo(
            json.dumps({"mode": mode.name, "compared": result.compared, "differences": found}, indent=2)
        )
    else:
        for each in result.differences:
            click.echo(each)
        count = len(result.differences)
        summary = f"{count} difference{'' if count == 1 else 's'}" if count else "no differences"
        click.echo(f"mode {mode.name}: {summary} in {result.compared} entries")
    return _DIFFERENT if result.differences else 0
