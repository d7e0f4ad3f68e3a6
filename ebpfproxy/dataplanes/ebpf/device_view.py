"""The devices that the packet path looks at: what the map says of them, and what the kernel has there."""

import struct
from socket import if_indextoname
from typing import NamedTuple

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.maps import Maps
from ebpfproxy.kernel import tc
from ebpfproxy.model.address import Address, format_address, is_unspecified

_IFINDEX = struct.Struct("=I")


class DeviceRow(NamedTuple):
    """`role`: what comes in is of a pod of this node, or of the net. `link`: what its packets begin with.

    `masquerade` are the addresses that packets leaving there are masqueraded with. `ingress` and `egress`
    are the ids of the programs of our filters, 0 where there is none. `clsact`: "ours" where the agent
    made it, "theirs", or "none". `name` is "?" where this network namespace has no such device.
    """

    device: str
    ifindex: int
    role: str
    link: str
    masquerade: list[str]
    ingress: int
    egress: int
    clsact: str


def devices(maps: Maps) -> list[DeviceRow]:
    """By ifindex. What the kernel has is that of the network namespace of the calling thread.

    Raises Rejected where filters cannot be read.
    """
    found = [(int(_IFINDEX.unpack(key)[0]), value) for key, value in maps["devices"].items()]
    return [_device(ifindex, value) for ifindex, value in sorted(found)]


def _device(ifindex: int, value: bytes) -> DeviceRow:
    v4, v6, flags, _ = abi.DEVICE.unpack(value)
    return DeviceRow(
        device=_name(ifindex),
        ifindex=ifindex,
        role="pod" if flags & abi.DEVICE_POD else "net",
        link="ip" if flags & abi.DEVICE_LAYER3 else "ethernet",
        masquerade=[format_address(Address(each)) for each in (v4, v6) if not is_unspecified(each)],
        ingress=tc.program_id(ifindex, tc.Side.INGRESS) or 0,
        egress=tc.program_id(ifindex, tc.Side.EGRESS) or 0,
        clsact=_clsact(ifindex, flags),
    )


def _clsact(ifindex: int, flags: int) -> str:
    if not tc.has_clsact(ifindex):
        return "none"
    return "ours" if flags & abi.DEVICE_CLSACT else "theirs"


def _name(ifindex: int) -> str:
    try:
        return if_indextoname(ifindex)
    except OSError:
        return "?"
