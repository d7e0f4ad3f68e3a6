"""``ebpfproxy run``"""

import click

from ebpfproxy import log
from ebpfproxy.cli.cleanup import cleanup
from ebpfproxy.config import Config, FlagsCommand, config_options


@click.command("run", cls=FlagsCommand)
@config_options
def command(config: Config) -> None:
    """Keep this node's kernel in step with the cluster's Services, until a signal comes.

    The flags that kube-proxy has, too, mean the same here, so that its arguments carry over. At the
    end, the kernel goes on forwarding as it was told last.
    """
    from ebpfproxy import daemon  # only now: --help and a wrong flag need none of its libraries

    log.set_up(config.verbosity, config.logging_format)
    if config.cleanup:
        cleanup(config.bpffs_root, config.cgroup_root)
    else:
        daemon.run(config)
