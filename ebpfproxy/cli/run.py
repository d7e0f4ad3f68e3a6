"""``ebpfproxy run``: the agent."""

import click

from ebpfproxy import __version__, log
from ebpfproxy.cli.cleanup import cleanup
from ebpfproxy.cli.epilog import examples
from ebpfproxy.config import FlagsCommand, Loaded, loaded_options
from ebpfproxy.config.command import BooleanOption

logger = log.Logger(__name__)


def _show_version(context: click.Context, option: click.Parameter, text: str | None) -> None:
    """Print the version and exit, unless the value is false. kube-proxy accepts true, false and raw."""
    if text is not None and text != "false":
        click.echo(f"ebpfproxy {__version__}")
        context.exit()


@click.command(
    "run",
    cls=FlagsCommand,
    epilog=examples("""
    # Run the agent of the node node-1, with a configuration file.
    ebpfproxy run --config=/etc/ebpfproxy/config.conf --hostname-override=node-1
    # Serve a folder of manifests, without a cluster.
    ebpfproxy run --manifests=/tmp/services
    # Show the configuration that flags result in.
    ebpfproxy run --proxy-mode=nftables --write-config-to=/dev/stdout
    """),
)
@loaded_options
@click.option(
    "--version",
    cls=BooleanOption,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def command(loaded: Loaded) -> None:
    """Run the agent: program the cluster's Services into this node's kernel until SIGTERM or SIGINT.

    Flags of kube-proxy have the same meaning here. After the agent exits, the kernel keeps forwarding with
    the last programmed state.
    """
    config = loaded.config
    log.set_up(config.verbosity, config.logging_format)
    log.capture()
    _log_remarks(loaded)
    if config.write_config_to:
        from ebpfproxy.config.file import write_configuration

        write_configuration(loaded, config.write_config_to)
    elif config.cleanup:
        cleanup(config)
    elif config.init_only:
        from ebpfproxy.agent.initialize import initialize

        initialize(config)
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
