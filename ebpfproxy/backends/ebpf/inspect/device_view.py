"""The devices that the packet path looks at: what the map says of them, and what the kernel has there."""

import struct
from pathlib import Path
from socket import if_indextoname
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi, attachments
from ebpfproxy.backends.ebpf.attachments import SIDES, Attachments
from ebpfproxy.backends.ebpf.entries import EGRESS, INGRESS
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.linux.bpf import tc
from ebpfproxy.model.address import Address, format_address, is_unspecified

_IFINDEX = struct.Struct("=I")


class DeviceRow(NamedTuple):
    """`role`: what comes in is of a pod of this node, or of the net. `link`: what its packets begin with.

    `masquerade` are the addresses that packets leaving there are masqueraded with. `ingress` and `egress`
    are the ids of the agent's programs, 0 where there is none. `before`: what sees packets earlier than they
    do, with the side. `clsact`: "ours" where the agent made it, "theirs", or "none". `device` is "?" where
    this network namespace has no such device.
    """

    device: str
    ifindex: int
    role: str
    link: str
    masquerade: list[str]
    ingress: int
    egress: int
    clsact: str
    before: list[str]


def devices(maps: Maps, links: Path) -> list[DeviceRow]:
    """By ifindex; `links` is where those of devices are pinned. What the kernel has is that of the network
    namespace of the calling thread.

    Raises Rejected where programs and filters cannot be read.
    """
    ways = attachments.choose(links)
    found = [(int(_IFINDEX.unpack(key)[0]), value) for key, value in maps["devices"].items()]
    return [_device(ifindex, value, ways) for ifindex, value in sorted(found)]


def _device(ifindex: int, value: bytes, ways: Attachments) -> DeviceRow:
    v4, v6, flags, _ = abi.DEVICE.unpack(value)
    running = {side: ways.running(ifindex, place) for side, place in SIDES.items()}
    ids = {side: found.program_id if found else 0 for side, found in running.items()}
    return DeviceRow(
        device=_name(ifindex),
        ifindex=ifindex,
        role="pod" if flags & abi.DEVICE_POD else "net",
        link="ip" if flags & abi.DEVICE_LAYER3 else "ethernet",
        masquerade=[format_address(Address(each)) for each in (v4, v6) if not is_unspecified(each)],
        ingress=ids[INGRESS],
        egress=ids[EGRESS],
        clsact=_clsact(ifindex, flags),
        before=[f"{side}: {name}" for side, found in running.items() if found for name in found.before],
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
