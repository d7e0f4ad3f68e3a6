"""``ebpfproxy version``: the versions of ebpfproxy, Python and the kernel."""

import json
import os
import platform

import click

from ebpfproxy import __version__
from ebpfproxy.cli.epilog import examples
from ebpfproxy.config.command import FlagsCommand


@click.command(
    "version",
    cls=FlagsCommand,
    epilog=examples("""
    # Show the versions of Python and the kernel, too.
    ebpfproxy version -o json
    """),
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format. json includes the versions of Python and the kernel.",
)
def command(output: str) -> None:
    """Show the version."""
    if output == "text":
        click.echo(f"ebpfproxy {__version__}")
        return
    host = os.uname()
    versions = {
        "version": __version__,
        "python": platform.python_version(),
        "kernel": host.release,
        "architecture": host.machine,
    }
    click.echo(json.dumps(versions, indent=2))
