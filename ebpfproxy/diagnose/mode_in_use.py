"""Finds the mode that serves on this node."""

from ebpfproxy.backends.interface import Mode
from ebpfproxy.backends.selection import AUTO, MODES, choose
from ebpfproxy.config import Config
from ebpfproxy.diagnose import agent_pages


def mode_in_use(config: Config) -> Mode:
    """The configured mode. For `auto`: the mode that the running agent reports, else the one that `auto`
    selects.

    Raises Unsupported if no agent answers and no mode works on this machine.
    """
    wanted = _reported(config) if config.proxy_mode == AUTO else config.proxy_mode
    found = next((mode for mode in MODES if mode.name == wanted), None)
    return found or choose(config).mode


def _reported(config: Config) -> str:
    """What the agent's metrics server answers at /proxyMode, "" if it does not answer."""
    if config.metrics_listen is None:
        return ""
    return agent_pages.read_text(config.metrics_listen, "/proxyMode")
