"""A node whose agent has ended: what it left in the kernel can be changed, verified and restored.

Everything acts in the network namespace of the calling process.
"""

import dataclasses
from random import Random

from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.backends.difference import Difference
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.backends.selection import MODES
from ebpfproxy.config import Config
from ebpfproxy.diagnose.cluster import read_cluster
from ebpfproxy.diagnose.verify import verify
from ebpfproxy.model.namespace import Namespace


class Node:
    """`config` is that of the ended agent. `random` selects what is changed."""

    def __init__(self, config: Config, random: Random) -> None:
        self.config = config
        self.random = random
        self.mode = next(mode for mode in MODES if mode.name == config.proxy_mode)
        self._cluster = read_cluster(config)

    def differences(self) -> tuple[Difference, ...]:
        """What `verify` finds. As no agent runs, it need not wait between comparisons."""
        return verify(self.mode, self.config, lambda config: self._cluster, lambda seconds: None).differences

    def restore(self) -> None:
        """Bring the kernel in sync, as the agent does."""
        found: list[tuple[Namespace, ...]] = [()]
        callbacks = Callbacks(namespaces=found.append)
        active = ActiveMode(self.mode, self.config, callbacks)
        active.open()
        try:
            active.plan_all(dataclasses.replace(self._cluster.state, namespaces=found[-1]))
            active.sync(verify=True)
        finally:
            active.close()
