"""``ebpfproxy cleanup``"""

import contextlib
from pathlib import Path

import click

from ebpfproxy.config import FlagsCommand, options
from ebpfproxy.errors import EbpfProxyError


@click.command("cleanup", cls=FlagsCommand)
@options("bpffs_root", "cgroup_root")
def command(bpffs_root: Path, cgroup_root: Path | None) -> None:
    """Remove all that ebpfproxy put into this node's kernel: programs, links, filters, maps, devices.

    Run it in the node's network namespace: filters and devices are looked for there. Services are no
    longer reachable through ebpfproxy afterwards. Stop the agent first: while one runs with this
    --bpffs-root, or looks after devices of this network namespace, this is refused. Sockets that are
    connected go on; connections whose packets were translated, as those of clients outside, end.
    """
    cleanup(bpffs_root, cgroup_root)


def cleanup(bpffs_root: Path, cgroup_root: Path | None) -> None:
    """Remove, and say what was removed. Raises EbpfProxyError."""
    from ebpfproxy.dataplanes.ebpf import removal
    from ebpfproxy.kernel import mounts

    if cgroup_root is None:
        with contextlib.suppress(EbpfProxyError):  # needed only where the kernel has no links
            cgroup_root = mounts.host_cgroup2_root()
    removed = removal.remove(bpffs_root, cgroup_root)
    for what in removed:
        click.echo(f"removed {what}")
    if not removed:
        click.echo(f"nothing of ebpfproxy is in {bpffs_root}, or on this node's devices")
