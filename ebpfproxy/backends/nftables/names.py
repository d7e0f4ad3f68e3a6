"""The names of a ServicePort's objects, as kube-proxy's mode nftables computes them.

Source: servicePortChainNameBase and servicePortEndpointChainNameBase in pkg/proxy/nftables/proxier.go.
"""

import base64
import hashlib
import re

from ebpfproxy.model.address import Address, format_address
from ebpfproxy.model.service import ServicePortName

_MAX_NAME = 240  # as in kube-proxy; the kernel allows 255 (NFT_NAME_MAXLEN without the zero byte)
_MAX_COMMENT = 128  # NFTNL_UDATA_COMMENT_MAXLEN
_INVALID = re.compile(r"[^A-Za-z0-9_./-]")


def port_name(name: ServicePortName) -> str:
    """Return the part of a name after "service-", "local-", "external-" or "firewall-".

    >>> from ebpfproxy.model.address import Protocol
    >>> port_name(ServicePortName("ns1", "svc1", "p80", Protocol.TCP))
    'ULMVA6XW-ns1/svc1/tcp/p80'
    """
    return _hashed(_base(name))


def list_identity(chain: str) -> bytes:
    """Return the identity of the endpoints that a chain selects from; see `entries.Endpoints`.

    With 10,000 chains, the probability that two have the same one is 3e-12.
    """
    return hashlib.sha256(chain.encode()).digest()[:8]


def affinity_number(name: ServicePortName, address: Address, port: int) -> int:
    """Return the number of an endpoint in the set of clients with session affinity.

    If two endpoints have the same number, a client of one may be sent to the other. It remains there.
    """
    number = affinity_number_of_set(f"affinity-{endpoint_name(name, address, port)}")
    assert number is not None
    return number


def affinity_number_of_set(set_name: str) -> int | None:
    """Return the `affinity_number` of the endpoint that has this set in kube-proxy; None for another name."""
    found = re.match("affinity-([A-Z2-7]{8})-", set_name)
    return int.from_bytes(base64.b32decode(found[1])[:4]) if found else None


def endpoint_name(name: ServicePortName, address: Address, port: int) -> str:
    """Return the part of a name after "endpoint-" or "affinity-" in kube-proxy and in previous versions.

    >>> from ebpfproxy.model.address import Protocol, parse_address
    >>> endpoint_name(ServicePortName("ns1", "svc1", "p80", Protocol.TCP), parse_address("10.180.0.1"), 80)
    '5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80'
    """
    address_text = format_address(address).replace(":", ".")  # a name cannot have colons
    return _hashed(f"{_base(name)}__{address_text}/{port}")


def comment(name: ServicePortName) -> str:
    """Return the comment that shows the Service of an element, truncated to the kernel's maximum."""
    return re.sub(r"[^A-Za-z0-9_./:-]", "_", str(name))[:_MAX_COMMENT]


def _base(name: ServicePortName) -> str:
    return f"{name.namespace}/{name.name}/{name.protocol.name.lower()}/{name.port}"


def _hashed(text: str) -> str:
    """Prefix `text` with its hash. So it may be truncated, and similar names differ early.

    The API server only admits characters that nftables also accepts in a name. A manifest file may have
    others: they are replaced, and the hash still distinguishes such names.
    """
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    full = f"{base64.b32encode(digest[:5]).decode()}-{_INVALID.sub('_', text)}"
    return full if len(full) <= _MAX_NAME else full[: _MAX_NAME - 3] + "..."
