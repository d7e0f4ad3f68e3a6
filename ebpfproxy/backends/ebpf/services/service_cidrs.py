"""The ServiceCIDRs as the programs know them: networks in `local_networks`, and a network around all of them
in `node`, so that most packets need no lookup.
"""

import struct
from collections.abc import Collection

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, Family, Network, common_network, network_family

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
_NONE = b"\xff" * 16, bytes(16)
"""No address has all these bits after the mask."""


def read(local_networks: Map) -> frozenset[Network]:
    """Return the networks of the map whose unused addresses the programs reject."""
    return frozenset(
        Network(Address(address), length)
        for key, value in local_networks.items()
        for length, address in (abi.NETWORK_KEY.unpack(key),)
        if _U32.unpack(value)[0] & abi.NETWORK_SERVICE_CIDR
    )


def delete(local_networks: Map) -> None:
    """Delete these networks from the map. Raises KernelError."""
    for net in read(local_networks):
        local_networks.delete(abi.NETWORK_KEY.pack(net.length, net.address))


def bounds(networks: Collection[Network]) -> tuple[int, int, int, int]:
    """Return the last fields of struct node: address and mask for IPv4, then for IPv6."""
    address4, mask4 = _bound([net for net in networks if network_family(net) is Family.IPV4])
    address6, mask6 = _bound([net for net in networks if network_family(net) is Family.IPV6])
    words = [_U32.unpack(each[-4:])[0] for each in (address4, mask4)]
    halves = [_U64.unpack(each[:8])[0] for each in (address6, mask6)]
    return words[0], words[1], halves[0], halves[1]


def _bound(networks: Collection[Network]) -> tuple[bytes, bytes]:
    if not networks:
        return _NONE
    address, length = common_network(networks)
    mask = (1 << 128) - (1 << 128 - length)
    return address, mask.to_bytes(16)
