"""The names of a ServicePort's own objects: those that kube-proxy's nftables mode gives them.

servicePortChainNameBase and servicePortEndpointChainNameBase in pkg/proxy/nftables/proxier.go.
"""

import base64
import hashlib
import re

from ebpfproxy.model.address import Address, format_address
from ebpfproxy.model.service import ServicePortName

_LONGEST = 240  # of the kernel's 255 (NFT_NAME_MAXLEN with the final zero) as much as kube-proxy uses
_COMMENT = 128  # NFTNL_UDATA_COMMENT_MAXLEN
_FOREIGN = re.compile(r"[^A-Za-z0-9_./-]")


def port_name(name: ServicePortName) -> str:
    """What follows "service-", "local-", "external-" or "firewall-".

    >>> from ebpfproxy.model.address import Protocol
    >>> port_name(ServicePortName("ns1", "svc1", "p80", Protocol.TCP))
    'ULMVA6XW-ns1/svc1/tcp/p80'
    """
    return _hashed(_base(name))


def endpoint_name(name: ServicePortName, address: Address, port: int) -> str:
    """What follows "endpoint-" or "affinity-".

    >>> from ebpfproxy.model.address import Protocol, parse_address
    >>> endpoint_name(ServicePortName("ns1", "svc1", "p80", Protocol.TCP), parse_address("10.180.0.1"), 80)
    '5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80'
    """
    place = format_address(address).replace(":", ".")  # a name cannot have colons
    return _hashed(f"{_base(name)}__{place}/{port}")


def comment(name: ServicePortName) -> str:
    """Shows an operator which Service has the element. Cut where it is longer than the kernel keeps."""
    return re.sub(r"[^A-Za-z0-9_./:-]", "_", str(name))[:_COMMENT]


def _base(name: ServicePortName) -> str:
    return f"{name.namespace}/{name.name}/{name.protocol.name.lower()}/{name.port}"


def _hashed(text: str) -> str:
    """`text` behind a hash of it, so that it may be cut, and that names that are much alike differ early.

    What the API server admits has no other letters than a name of nftables may have. A manifest in a
    folder may: they are replaced, and the hash still distinguishes such names.
    """
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    whole = f"{base64.b32encode(digest[:5]).decode()}-{_FOREIGN.sub('_', text)}"
    return whole if len(whole) <= _LONGEST else whole[: _LONGEST - 3] + "..."
