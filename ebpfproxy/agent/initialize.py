"""``--init-only``: prepares the kernel for the selected mode as a start does, without serving.

kube-proxy sets sysctls and conntrack limits and ends (InitAndExit in cmd/kube-proxy/app/options.go). Here the
mode is opened, which also loads and pins programs or creates tables. What a previous run serves continues.
"""

from ebpfproxy.agent.mode_switch import ModeSwitcher
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.config import Config
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.log import Logger

log = Logger(__name__)

INITIALIZED = "Prepared the kernel"
"""`--init-only` has ended successfully. `mode` is the mode for which the kernel is prepared."""


def initialize(config: Config) -> None:
    """Select a mode, open it and close it. Raises EbpfProxyError, also while an agent runs on this node."""
    modes = ModeSwitcher(config, Callbacks(), Metrics())
    try:
        modes.open()
        log.info(INITIALIZED, mode=modes.serving.name)
    finally:
        modes.close()
