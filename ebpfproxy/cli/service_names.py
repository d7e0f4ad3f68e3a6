"""Completion of the names of Services, from the BPF maps."""

import click

from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.errors import EbpfProxyError


def complete_service(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the Services in the maps as namespace/name, and with their ports once the text has a colon.

    The maps are those of the command's --bpffs-root. Returns nothing if they cannot be read.
    """
    from ebpfproxy.backends.ebpf.inspect.tables import service_names

    try:
        root = OPTIONS["bpffs_root"].parse(context.params.get("bpffs_root"))
        names = service_names(root)
    except (EbpfProxyError, OSError, ValueError):
        return []
    if ":" not in incomplete:
        names = {name.partition(":")[0] for name in names}
    return sorted(name for name in names if name.startswith(incomplete))
