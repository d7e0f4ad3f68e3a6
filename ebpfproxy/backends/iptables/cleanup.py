"""Removes everything that mode iptables ever left, including the chains and rules of kube-proxy.

Besides the objects that `xtables.cleanup` keeps, these stay on purpose:

- KUBE-FIREWALL with its rules and the jumps to it. They also belong to the kubelet. They keep neighbors off
  127.0.0.1 while route_localnet is on, which is never reset.
- The kubelet's own chains (KUBE-IPTABLES-HINT, KUBE-KUBELET-CANARY, KUBE-MARK-DROP).
"""

from collections.abc import Callable, Mapping

from ebpfproxy.backends.iptables import packet_counters
from ebpfproxy.backends.iptables.layout import LAYOUT
from ebpfproxy.backends.xtables import cleanup, names
from ebpfproxy.backends.xtables.cleanup import COMMON_CHAINS, are_of_ipvs
from ebpfproxy.backends.xtables.entries import FILTER, MANGLE, NAT
from ebpfproxy.backends.xtables.layout import TableAndName
from ebpfproxy.model.address import Family

_IPVS_CHAINS = {
    (NAT, names.LOAD_BALANCER),
    (NAT, names.NODE_PORT),
    (FILTER, names.NODE_PORT),
    (FILTER, names.SOURCE_RANGES_FIREWALL),
    (FILTER, names.IPVS_OUT_FILTER),
    (MANGLE, names.IPVS_OUT_FILTER),
}

_ALL_CHAINS = (LAYOUT.shared | LAYOUT.exclusive | _IPVS_CHAINS) - LAYOUT.partly_owned.keys()


def leftovers(chains: Mapping[TableAndName, list[str]]) -> set[TableAndName]:
    """Return the chains to remove, including those of mode ipvs unless that mode has rules in the common
    chains.

    KUBE-IPVS-FILTER always stays, since mode ipvs needs it as long as it has connections.
    """
    own = _ALL_CHAINS - COMMON_CHAINS - _IPVS_CHAINS if are_of_ipvs(chains) else _ALL_CHAINS
    return {each for each in chains if each in own or LAYOUT.is_of_service(*each)}


def remove(dry_run: bool = False) -> list[str]:
    """See `xtables.cleanup.remove`. The packet counters are removed last."""
    lines = cleanup.remove(leftovers, dry_run)
    return [*lines, *packet_counters.remove(bool(lines), dry_run)]


def drain(translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """See `xtables.cleanup.drain`. The packet counters are removed last."""
    lines, needs_next_call = cleanup.drain(leftovers, translates)
    return [*lines, *packet_counters.remove(bool(lines))], needs_next_call
