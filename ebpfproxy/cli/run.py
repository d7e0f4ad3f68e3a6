"""``ebpfproxy run``: the agent."""

import click

from ebpfproxy import log
from ebpfproxy.cli.cleanup import cleanup
from ebpfproxy.config import FlagsCommand, Loaded, loaded_options

logger = log.Logger(__name__)


@click.command("run", cls=FlagsCommand)
@loaded_options
def command(loaded: Loaded) -> None:
    """Run the agent: program the cluster's Services into this node's kernel until SIGTERM or SIGINT.

    Flags of kube-proxy have the same meaning here. After the agent exits, the kernel keeps forwarding with
    the last programmed state.
    """
    config = loaded.config
    log.set_up(config.verbosity, config.logging_format)
    _log_remarks(loaded)
    if config.write_config_to:
        from ebpfproxy.config.file import write_configuration

        write_configuration(loaded, config.write_config_to)
    elif config.cleanup:
        cleanup(config)
    else:
        from ebpfproxy.agent import process

        process.run(loaded, lambda: _reload(loaded))


def _reload(loaded: Loaded) -> Loaded:
    reloaded = loaded.reload()
    _log_remarks(reloaded)
    return reloaded


def _log_remarks(loaded: Loaded) -> None:
    for remark in loaded.remarks:
        logger.warning(remark.message, **remark.values)
