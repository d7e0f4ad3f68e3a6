"""``ebpfproxy support-bundle``: writes what describes this node into one archive, without secrets."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.terminal import console, progress
from ebpfproxy.config import FlagsCommand, Loaded, loaded_options
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.errors import ConfigError

if TYPE_CHECKING:
    from ebpfproxy.diagnose.bundle.archive import Content, Entry, Part

_TO_OUTPUT = "-"


@click.command(
    "support-bundle",
    cls=FlagsCommand,
    epilog=examples("""
    # Write a bundle. Then read it before you send it.
    ebpfproxy support-bundle node1.tar.gz
    # Replace names and addresses, and add a log of `kubectl logs`.
    ebpfproxy support-bundle node1-public.tar.gz --anonymize --log=agent.log
    # To standard output, for `kubectl exec`.
    ebpfproxy support-bundle - > node1.tar.gz
    """),
)
@click.argument("file", metavar="FILE")
@click.option(
    "--anonymize",
    is_flag=True,
    help="Replace names of Services, namespaces and nodes, and addresses: each by the same other one in all "
    "files. Addresses keep their common prefixes.",
)
@click.option(
    "--log",
    "logs",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Include this log of the agent, instead of the logs found on the node. May be repeated.",
)
@loaded_options
def command(file: str, anonymize: bool, logs: tuple[Path, ...], loaded: Loaded) -> None:
    """Write a support bundle: a gzipped tar archive with the results of doctor, dump and verify, versions,
    the pages of the running agent, and its log. FILE must not exist; - is standard output.

    Keys, tokens, passwords, Authorization headers and annotations are redacted, and so is each member of JSON
    that is not known to be harmless. What cannot be collected is named in contents.json, and the bundle is
    written without it. Run it with the agent's flags, and in the agent's namespaces or pod. Prints what the
    bundle contains.
    """
    from ebpfproxy.diagnose.bundle import archive
    from ebpfproxy.diagnose.bundle.anonymize import Anonymizer

    to_output = file == _TO_OUTPUT
    if to_output and sys.stdout.isatty():
        raise ConfigError("cannot write an archive to a terminal", "give a file, or redirect the output")
    anonymizer = Anonymizer(os.urandom(16)) if anonymize else None
    if anonymizer:
        anonymizer.learn({os.uname().nodename, loaded.config.node_name})
    path = None if to_output else Path(file)
    if path and path.exists():  # before the parts are collected, which takes seconds
        raise ConfigError(f"cannot write {path}: it exists", "give another name, or remove the file")
    with progress("collecting the parts of the bundle"):
        collected = list(archive.collect(_parts(loaded, logs), anonymizer))
    entries = archive.write(path, collected, sys.stdout.buffer)
    _show(file, entries, to_errors=to_output)


def _parts(loaded: Loaded, logs: tuple[Path, ...]) -> "Iterator[Part]":
    from ebpfproxy.backends.ebpf.inspect import saved
    from ebpfproxy.cli.dump_sections import SECTIONS
    from ebpfproxy.diagnose.bundle import node
    from ebpfproxy.diagnose.bundle.archive import Content, Part
    from ebpfproxy.diagnose.bundle.logs import read_logs

    flags, members = list(_flags(loaded)), saved.FIELDS | {"header", *SECTIONS}
    shown = "".join(f"{flag}\n" for flag in flags)
    yield Part("versions.json", "versions", node.versions, node.VERSIONS)
    yield Part("flags.txt", "flags of this command", lambda: Content(shown), node.FLAGS)
    yield Part("doctor.txt", "ebpfproxy doctor", _output_of(["doctor", *flags]))
    yield Part("dump.json", saved.SAVE, _output_of(["dump", "all", "-o", "json", *flags]), members)
    yield Part("verify.txt", "ebpfproxy verify", _output_of(["verify", *flags]))
    yield from node.pages(loaded.config)
    yield Part("agent.log", "log of the agent", lambda: read_logs(loaded.config.proc_root, logs))


def _flags(loaded: Loaded) -> Iterator[str]:
    """The flags that were given, for the other commands."""
    for name, given in loaded.flags.items():
        if given is not None:
            texts = given if isinstance(given, tuple | list) else (given,)
            yield from (f"{OPTIONS[name].flag}={text}" for text in texts)


def _output_of(words: list[str]) -> "Callable[[], Content]":
    """What a command prints. Its exit code and its errors are notes, for example that of doctor for a missing
    feature. Without any output, its errors are an error."""

    def run() -> "Content":
        from ebpfproxy.cli import main
        from ebpfproxy.diagnose.bundle.archive import Content
        from ebpfproxy.errors import Rejected

        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(words)
        said = " ".join(errors.getvalue().split()).replace(" hint: ", "; ")
        if not output.getvalue():
            raise Rejected(said.removeprefix("ebpfproxy: ") or f"exit code {code}, without output")
        notes = ([f"exit code {code}"] if code else []) + ([said] if said else [])
        return Content(output.getvalue(), "; ".join(notes))

    return run


def _show(file: str, entries: "list[Entry]", to_errors: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("FILE", "CONTENT", "BYTES", "NOTE"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "BYTES" else "left")
    for each in entries:
        note = Text(f"left out: {each.error}", "yellow") if each.error else Text(each.note)
        table.add_row(each.file, each.title, "" if each.error else str(each.size), note)
    output = console(piped_width=400, stderr=to_errors)
    output.print(table)
    if not to_errors:
        output.print(f"wrote {file}: read it before you send it", markup=False)
