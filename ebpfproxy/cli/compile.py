"""``ebpfproxy compile``: the BPF programs as an object file, for packages and images."""

from pathlib import Path

import click

from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.terminal import progress
from ebpfproxy.config.command import FlagsCommand


@click.command(
    "compile",
    cls=FlagsCommand,
    epilog=examples("""
    # Compile for a wheel or an image.
    ebpfproxy compile --output=build/objects
    """),
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Folder for the object file. Object files of other versions in it are removed.",
)
def command(output: Path) -> None:
    """Write the compiled BPF programs to a file, with which an agent needs neither bcc nor clang.

    One file serves all kernels and all sizes of maps. The compiler runs as root, and only if this
    installation has no valid object file yet.
    """
    from ebpfproxy.backends.ebpf.programs import object_file
    from ebpfproxy.linux.bpf import object_cache

    with progress("compiling the BPF programs: about 4 s"):
        saved = object_cache.save_only(object_file(), output)
    click.echo(saved)
