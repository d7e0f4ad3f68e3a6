"""Removing everything that this mode ever left, be it kube-proxy's.

What stays on purpose, beside what `xtables.removal` leaves:

- KUBE-FIREWALL with its rules and the jumps to it, since they are the kubelet's as well, and keep neighbors
  off 127.0.0.1 where route_localnet is on, which is never turned off;
- the kubelet's own chains (KUBE-IPTABLES-HINT, KUBE-KUBELET-CANARY, KUBE-MARK-DROP).
"""

from collections.abc import Callable, Mapping

from ebpfproxy.backends.iptables.layout import LAYOUT
from ebpfproxy.backends.xtables import cleanup, names
from ebpfproxy.backends.xtables.cleanup import COMMON_CHAINS, are_of_ipvs
from ebpfproxy.backends.xtables.entries import FILTER, MANGLE, NAT
from ebpfproxy.backends.xtables.layout import TableAndName
from ebpfproxy.model.address import Family

_OF_IPVS = {
    (NAT, names.LOAD_BALANCER),
    (NAT, names.NODE_PORT),
    (FILTER, names.NODE_PORT),
    (FILTER, names.SOURCE_RANGES_FIREWALL),
    (FILTER, names.IPVS_OUT_FILTER),
    (MANGLE, names.IPVS_OUT_FILTER),
}

_NAMES = (LAYOUT.shared | LAYOUT.exclusive | _OF_IPVS) - LAYOUT.partly_owned.keys()


def leftovers(chains: Mapping[TableAndName, list[str]]) -> set[TableAndName]:
    """Those of the mode ipvs, too, unless that mode has its rules in the chains that are of both; but for
    KUBE-IPVS-FILTER, which that mode needs for as long as it has connections.
    """
    own = _NAMES - COMMON_CHAINS - _OF_IPVS if are_of_ipvs(chains) else _NAMES
    return {each for each in chains if each in own or LAYOUT.is_of_service(*each)}


def remove(dry_run: bool = False) -> list[str]:
    """See `xtables.removal.remove`."""
    return cleanup.remove(leftovers, dry_run)


def drain(translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """See `xtables.removal.drain`."""
    return cleanup.drain(leftovers, translates)
