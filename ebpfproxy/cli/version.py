"""``ebpfproxy version``"""

import json
import os
import platform

import click

from ebpfproxy import __version__
from ebpfproxy.config.command import FlagsCommand


@click.command("version", cls=FlagsCommand)
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="The form to show it in."
)
def command(output: str) -> None:
    """Show the version; as JSON with those of Python and the kernel."""
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
