"""Reports rules of other programs that have another effect in the current mode than with kube-proxy."""

import threading

from ebpfproxy.config import Config
from ebpfproxy.log import Logger

log = Logger(__name__)

FOUND = "Rules of other programs have another effect in this mode"
"""After a start or a mode switch: rules drop packets to endpoints, or rules before NAT no longer close
NodePorts. `ebpfproxy doctor` shows the same."""


def report(config: Config, mode: str) -> None:
    """Log each finding, in a thread: reading long tables of iptables takes seconds."""
    threading.Thread(target=_report, args=(config, mode), name="firewall-report", daemon=True).start()


def _report(config: Config, mode: str) -> None:
    from ebpfproxy.backends import firewall_checks  # it takes time: after the first sync

    for each in firewall_checks.probe(config, mode):
        if not each.present:
            log.warning(FOUND, mode=mode, reason=each.missing, hint=each.remedy)
