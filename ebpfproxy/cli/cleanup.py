"""``ebpfproxy cleanup``: removes what ebpfproxy or kube-proxy created in the kernel."""

import click

from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.terminal import progress
from ebpfproxy.config import Config, FlagsCommand, config_options
from ebpfproxy.errors import AlreadyExists, EbpfProxyError, Rejected


@click.command(
    "cleanup",
    cls=FlagsCommand,
    epilog=examples("""
    # Show what would be removed.
    ebpfproxy cleanup --dry-run
    # Remove it.
    ebpfproxy cleanup
    # After a roll-back: remove what kube-proxy, which serves again, does not use.
    ebpfproxy cleanup --beside-kube-proxy
    """),
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option(
    "--beside-kube-proxy",
    is_flag=True,
    help="Remove only what kube-proxy does not use. Run it after a roll-back, when kube-proxy has synced.",
)
@config_options
def command(config: Config, dry_run: bool, beside_kube_proxy: bool) -> None:
    """Remove everything that ebpfproxy or kube-proxy created in this node's kernel, in any mode.

    If the node has direct server return, this also removes the annotation of its Node object. That needs
    --kubeconfig or --master outside a pod, and --hostname-override as for the agent.

    Stop the agent first: the command fails while one runs in this network namespace or uses this
    --bpffs-root. Run it in the node's network namespace. Services are no longer reachable afterwards.
    Sockets that are connected to an endpoint stay connected. Connections that are translated packet by
    packet, such as those of outside clients, can end.
    """
    cleanup(config, dry_run, beside_kube_proxy)


def cleanup(config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> None:
    """Remove the objects of all modes, and the announcement of direct server return at the Node; print what
    was removed.

    If one of these fails, the others are done before the error is raised. Raises EbpfProxyError.
    """
    from ebpfproxy.agent import announcer
    from ebpfproxy.backends.selection import MODES
    from ebpfproxy.linux.locks import NamespaceLock

    lock = None
    if not dry_run:
        try:
            lock = NamespaceLock()
        except AlreadyExists as running:
            hint = "stop the agent first; a running agent would restore everything"
            raise Rejected(running.message, hint) from running
    failures: list[EbpfProxyError] = []
    removed = []
    try:
        try:
            removed += announcer.withdraw(config, dry_run)  # while the API server's ClusterIP is served
        except EbpfProxyError as failure:
            failures.append(failure)
        with progress("searching the kernel for objects" if dry_run else "removing objects"):
            for mode in MODES:
                try:
                    removed += mode.remove(config, dry_run, beside_kube_proxy)
                except EbpfProxyError as failure:
                    failures.append(failure)
    finally:
        if lock:
            lock.release()
    for each in removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {each}")
    if failures:
        raise failures[0]
    if not removed:
        of = "ebpfproxy that kube-proxy does not use" if beside_kube_proxy else "ebpfproxy or kube-proxy"
        click.echo(f"nothing to remove: no objects of {of} on this node")
