"""The chains of modes iptables and ipvs, and which chains and rules belong to mode iptables. Pure.

The names are those of kube-proxy's modes. Debug scripts rely on them. A chain that both modes have contains
different rules in each.
"""

import base64
import hashlib
from typing import NamedTuple

from ebpfproxy.backends.iptables.entries import FILTER, MANGLE, NAT, Layout, target_chain
from ebpfproxy.model.service import ServicePortName

SERVICES = "KUBE-SERVICES"
POSTROUTING = "KUBE-POSTROUTING"
MARK_MASQ = "KUBE-MARK-MASQ"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"

# Only in mode iptables (pkg/proxy/iptables/proxier.go):
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"
NODE_PORTS = "KUBE-NODEPORTS"
FIREWALL = "KUBE-FIREWALL"
"""The kubelet also adds rules to this chain, and jumps to it."""
CANARY = "KUBE-PROXY-CANARY"

CLUSTER, LOCAL, EXTERNAL, SOURCES, ENDPOINT = (
    "KUBE-SVC-",
    "KUBE-SVL-",
    "KUBE-EXT-",
    "KUBE-FW-",
    "KUBE-SEP-",
)

SERVICE_PREFIXES = (CLUSTER, LOCAL, EXTERNAL, SOURCES, ENDPOINT, "KUBE-XLB-")
"""How the names of a Service's chains begin. The last prefix is that of kube-proxy before 1.24, and is never
written.
"""

# Only in mode ipvs (pkg/proxy/ipvs/proxier.go):
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
NODE_PORT = "KUBE-NODE-PORT"
SOURCE_RANGES_FIREWALL = "KUBE-SOURCE-RANGES-FIREWALL"
IPVS_FILTER = "KUBE-IPVS-FILTER"
IPVS_OUT_FILTER = "KUBE-IPVS-OUT-FILTER"
IPVS_POSTROUTING = "KUBE-IPVS-POSTROUTING"  # not kube-proxy's


SHARED_CHAINS = (
    (FILTER, EXTERNAL_SERVICES),
    (FILTER, NODE_PORTS),
    (FILTER, SERVICES),
    (FILTER, PROXY_FIREWALL),
    (FILTER, FIREWALL),
    (NAT, SERVICES),
    (NAT, NODE_PORTS),
)
"""Table and name of each shared chain."""

NODE_CHAINS = (
    (FILTER, FORWARD),
    (NAT, POSTROUTING),
    (NAT, MARK_MASQ),
    (MANGLE, CANARY),
    (NAT, CANARY),
    (FILTER, CANARY),
)
"""Table and name of each chain whose rules all belong to the node."""

JUMP_TARGETS = {
    FILTER: (
        EXTERNAL_SERVICES,
        NODE_PORTS,
        SERVICES,
        FORWARD,
        PROXY_FIREWALL,
        FIREWALL,
    ),
    NAT: (SERVICES, POSTROUTING),
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
    return target_chain(text) == NODE_PORTS


def _counts_nothing(text: str) -> bool:
    return _COUNTING not in text


LAYOUT = Layout(
    shared=frozenset(SHARED_CHAINS),
    exclusive=frozenset(NODE_CHAINS),
    service_prefixes=SERVICE_PREFIXES,
    jump_targets=JUMP_TARGETS,
    last={(NAT, SERVICES): _jumps_to_node_ports, (NAT, NODE_PORTS): _counts_nothing},
    partly_owned={(FILTER, FIREWALL): frozenset({LOCALNET_GUARD})},
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
    return ServiceChains(CLUSTER + hashed, LOCAL + hashed, EXTERNAL + hashed, SOURCES + hashed)


def endpoint_chain(name: ServicePortName, endpoint: str) -> str:
    """Return the name of the chain of an endpoint, "address:port" with IPv6 in brackets. Its hash also covers
    the endpoint.
    """
    return ENDPOINT + _hash(_hashed_name(name) + endpoint)


def _hashed_name(name: ServicePortName) -> str:
    return f"{name}{name.protocol.name.lower()}"


def _hash(text: str) -> str:
    """Return 16 characters, so that no name is longer than the 28 characters that the kernel allows."""
    return base64.b32encode(hashlib.sha256(text.encode()).digest()[:10]).decode()
