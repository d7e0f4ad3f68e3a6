"""The map `source_addresses`: what devices with several masquerade addresses use for which network."""

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import SourceKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.model.address import Address, Network

MAP = "source_addresses"
_FIELD_BITS = 64  # of the fields before the address


def read(maps: Maps) -> dict[SourceKey, Address]:
    """Return the entries. Raises KernelError."""
    found = {}
    for key, value in maps[MAP].items():
        length, ifindex, side, address = abi.SOURCE_KEY.unpack(key)
        network = Network(Address(address), length - _FIELD_BITS)
        found[SourceKey(ifindex, side, network)] = Address(value)
    return found


def pack(key: SourceKey) -> bytes:
    """Return the key as the map has it."""
    address, length = key.network
    return abi.SOURCE_KEY.pack(_FIELD_BITS + length, key.ifindex, key.side, address)
