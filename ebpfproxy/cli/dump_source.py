"""Where commands read the maps of mode ebpf: from the kernel, or from a saved dump (--from-dump)."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ebpfproxy import log
from ebpfproxy.config import Config

if TYPE_CHECKING:
    from ebpfproxy.backends.ebpf.inspect.saved import SavedView
    from ebpfproxy.backends.ebpf.inspect.tables import View
    from ebpfproxy.diagnose.verify import Inspectable, Verified

F = TypeVar("F", bound=Callable[..., Any])


def from_dump_option(function: F) -> F:
    """Add --from-dump to a command. It gets one argument, `from_dump`: a path, or None."""
    decorate = click.option(
        "--from-dump",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Read this file, written by `ebpfproxy dump all -o json`, instead of the maps of this node.",
    )
    return decorate(function)


def open_view(bpffs_root: Path, from_dump: Path | None) -> "View | SavedView":
    """Open the maps below `bpffs_root`, or the saved dump if there is one.

    Both are a `DumpView`; close it. Raises ConfigError for a file that is no saved dump, NotFound if nothing
    is pinned, Rejected if permissions are missing.
    """
    if from_dump:
        from ebpfproxy.backends.ebpf.inspect.saved import SavedView

        return SavedView(from_dump)
    from ebpfproxy.backends.ebpf.inspect.tables import View

    return View(bpffs_root)


def inspectable(config: Config, from_dump: Path | None) -> "Inspectable":
    """The mode in use on this node, or mode ebpf as a saved dump has it. Raises EbpfProxyError."""
    log.silence()
    if from_dump:
        from ebpfproxy.backends.ebpf.inspect.saved import SavedView
        from ebpfproxy.diagnose.dumped import DumpedMode

        return DumpedMode(SavedView(from_dump))
    from ebpfproxy.diagnose.mode_in_use import mode_in_use

    return mode_in_use(config)


def compared(config: Config, from_dump: Path | None) -> "tuple[Inspectable, Verified]":
    """Compare the kernel, or a saved dump, with the cluster. Raises EbpfProxyError."""
    from ebpfproxy.diagnose.dumped import DumpedMode
    from ebpfproxy.diagnose.verify import verify

    mode = inspectable(config, from_dump)
    return mode, mode.verify(config) if isinstance(mode, DumpedMode) else verify(mode, config)
