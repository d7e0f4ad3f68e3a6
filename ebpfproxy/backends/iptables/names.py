"""The names of a Service's chains, as kube-proxy gives them (pkg/proxy/iptables/proxier.go).

They have a hash in them: of the port's name, which is "namespace/name:port", the protocol in lower case and,
for an endpoint, "address:port".
"""

import base64
import hashlib
from typing import NamedTuple

from ebpfproxy.backends.xtables import names
from ebpfproxy.model.service import ServicePortName


class ServiceChains(NamedTuple):
    """The chains of one port of a Service, all in the nat table: what each scope of endpoints has, where
    what is not dialled by the ClusterIP goes first, and what source ranges are checked in.
    """

    cluster: str
    local: str
    external: str
    firewall: str


def service_chains(name: ServicePortName) -> ServiceChains:
    """
    >>> from ebpfproxy.model.address import Protocol
    >>> service_chains(ServicePortName("ns1", "svc1", "p80", Protocol.TCP)).firewall
    'KUBE-FW-XPGD46QRK7WJZT7O'
    """
    hashed = _hash(_hashed_name(name))
    return ServiceChains(
        names.CLUSTER + hashed, names.LOCAL + hashed, names.EXTERNAL + hashed, names.SOURCES + hashed
    )


def endpoint_chain(name: ServicePortName, endpoint: str) -> str:
    """`endpoint` is "address:port", IPv6 in brackets."""
    return names.ENDPOINT + _hash(_hashed_name(name) + endpoint)


def _hashed_name(name: ServicePortName) -> str:
    return f"{name}{name.protocol.name.lower()}"


def _hash(text: str) -> str:
    """16 characters, so that no name is longer than the 28 that the kernel allows."""
    return base64.b32encode(hashlib.sha256(text.encode()).digest()[:10]).decode()
