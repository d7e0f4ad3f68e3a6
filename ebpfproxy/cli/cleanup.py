"""``ebpfproxy cleanup``: removes what ebpfproxy or kube-proxy created in the kernel."""

import click

from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.terminal import progress
from ebpfproxy.config import Config, FlagsCommand, config_options
from ebpfproxy.errors import AlreadyExists, KernelError, Rejected


@click.command(
    "cleanup",
    cls=FlagsCommand,
    epilog=examples("""
    # Show what would be removed.
    ebpfproxy cleanup --dry-run
    # Remove it.
    ebpfproxy cleanup
    """),
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@config_options
def command(config: Config, dry_run: bool) -> None:
    """Remove everything that ebpfproxy or kube-proxy created in this node's kernel, in any mode.

    Stop the agent first: the command fails while one runs in this network namespace or uses this
    --bpffs-root. Run it in the node's network namespace. Services are no longer reachable afterwards.
    Sockets that are connected to an endpoint stay connected. Connections that are translated packet by
    packet, such as those of outside clients, can end.
    """
    cleanup(config, dry_run)


def cleanup(config: Config, dry_run: bool = False) -> None:
    """Remove the objects of all modes and print what was removed.

    If the cleanup of a mode fails, the other modes are cleaned up before the error is raised. Raises
    EbpfProxyError.
    """
    from ebpfproxy.backends.selection import MODES
    from ebpfproxy.linux.locks import NamespaceLock

    lock = None
    if not dry_run:
        try:
            lock = NamespaceLock()
        except AlreadyExists as running:
            hint = "stop the agent first; a running agent would restore everything"
            raise Rejected(running.message, hint) from running
    failures: list[KernelError] = []
    removed = []
    try:
        with progress("searching the kernel for objects" if dry_run else "removing objects"):
            for mode in MODES:
                try:
                    removed += mode.remove(config, dry_run)
                except KernelError as failure:
                    failures.append(failure)
    finally:
        if lock:
            lock.release()
    for each in removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {each}")
    if failures:
        raise failures[0]
    if not removed:
        click.echo("nothing to remove: no objects of ebpfproxy or kube-proxy on this node")
