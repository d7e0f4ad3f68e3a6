"""The chains of mode iptables: their names, and which chains and rules belong to the mode. Pure."""

import base64
import hashlib
from typing import NamedTuple

from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.entries import FILTER, MANGLE, NAT
from ebpfproxy.backends.xtables.layout import Layout
from ebpfproxy.backends.xtables.saved import target_chain
from ebpfproxy.model.service import ServicePortName

SHARED_CHAINS = (
    (FILTER, names.EXTERNAL_SERVICES),
    (FILTER, names.NODE_PORTS),
    (FILTER, names.SERVICES),
    (FILTER, names.PROXY_FIREWALL),
    (FILTER, names.FIREWALL),
    (NAT, names.SERVICES),
    (NAT, names.NODE_PORTS),
)
"""Table and name of each shared chain."""

NODE_CHAINS = (
    (FILTER, names.FORWARD),
    (NAT, names.POSTROUTING),
    (NAT, names.MARK_MASQ),
    (MANGLE, names.CANARY),
    (NAT, names.CANARY),
    (FILTER, names.CANARY),
)
"""Table and name of each chain whose rules all belong to the node."""

JUMP_TARGETS = {
    FILTER: (
        names.EXTERNAL_SERVICES,
        names.NODE_PORTS,
        names.SERVICES,
        names.FORWARD,
        names.PROXY_FIREWALL,
        names.FIREWALL,
    ),
    NAT: (names.SERVICES, names.POSTROUTING),
}
"""The chains that built-in chains jump to, by table, in the order in which kube-proxy prepends the jumps."""

LOCALNET_GUARD = (
    "! -s 127.0.0.0/8 -d 127.0.0.0/8"
    ' -m comment --comment "block incoming localnet connections"'
    " -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)
"""The IPv4 rule in KUBE-FIREWALL that must be in force before route_localnet is set. Otherwise neighbors
reach sockets that listen only on 127.0.0.1 (CVE-2020-8558).

`netfilter.nat_backend` waits for it and for the jumps to it (`node_rules.LOOPBACK_GUARD`). The rule exists
even if the sysctl is not set.
"""

INVALID_DROPPED = "ct_state_invalid_dropped_pkts"
"""The nfacct counter of packets that conntrack marks INVALID and KUBE-FORWARD drops."""
LOCALHOST_NODE_PORTS = "localhost_nps_accepted_pkts"
"""The nfacct counter of new connections to NodePorts on 127.0.0.0/8."""
_COUNTING = "-m nfacct --nfacct-name "


def counting(counter: str) -> str:
    """Return the match that counts a packet with an nfacct counter. It is true for every packet."""
    return _COUNTING + counter


def _jumps_to_node_ports(text: str) -> bool:
    return target_chain(text) == names.NODE_PORTS


def _counts_nothing(text: str) -> bool:
    return _COUNTING not in text


LAYOUT = Layout(
    shared=frozenset(SHARED_CHAINS),
    exclusive=frozenset(NODE_CHAINS),
    service_prefixes=names.SERVICE_PREFIXES,
    jump_targets=JUMP_TARGETS,
    last={(NAT, names.SERVICES): _jumps_to_node_ports, (NAT, names.NODE_PORTS): _counts_nothing},
    partly_owned={(FILTER, names.FIREWALL): frozenset({LOCALNET_GUARD})},
)


class ServiceChains(NamedTuple):
    """The names of the chains of one ServicePort, all in the table nat.

    - `cluster`, `local`: the chains of each scope of endpoints.
    - `external`: the first chain for frontends other than the ClusterIP.
    - `firewall`: the chain that checks source ranges.
    """

    cluster: str
    local: str
    external: str
    firewall: str


def service_chains(name: ServicePortName) -> ServiceChains:
    """Return the names of the chains of a ServicePort, as kube-proxy computes them
    (pkg/proxy/iptables/proxier.go).

    They contain a hash of the port's name ("namespace/name:port") and the protocol in lower case.

    >>> from ebpfproxy.model.address import Protocol
    >>> service_chains(ServicePortName("ns1", "svc1", "p80", Protocol.TCP)).firewall
    'KUBE-FW-XPGD46QRK7WJZT7O'
    """
    hashed = _hash(_hashed_name(name))
    return ServiceChains(
        names.CLUSTER + hashed, names.LOCAL + hashed, names.EXTERNAL + hashed, names.SOURCES + hashed
    )


def endpoint_chain(name: ServicePortName, endpoint: str) -> str:
    """Return the name of the chain of an endpoint, "address:port" with IPv6 in brackets. Its hash also covers
    the endpoint.
    """
    return names.ENDPOINT + _hash(_hashed_name(name) + endpoint)


def _hashed_name(name: ServicePortName) -> str:
    return f"{name}{name.protocol.name.lower()}"


def _hash(text: str) -> str:
    """Return 16 characters, so that no name is longer than the 28 characters that the kernel allows."""
    return base64.b32encode(hashlib.sha256(text.encode()).digest()[:10]).decode()
