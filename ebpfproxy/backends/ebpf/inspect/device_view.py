"""The devices of the packet path: their entries in the map, and the programs that are attached to them."""

import struct
from pathlib import Path
from socket import if_indextoname
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi, attachments
from ebpfproxy.backends.ebpf.attachments import SIDES, Attachments
from ebpfproxy.backends.ebpf.devices import source_addresses, xdp
from ebpfproxy.backends.ebpf.entries import EGRESS, INGRESS
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.linux.bpf import tc
from ebpfproxy.model.address import Address, format_address, is_unspecified

_UNKNOWN = "?"
_NONE = "none"
_IFINDEX = struct.Struct("=I")


class DeviceRow(NamedTuple):
    """One device.

    - `device`: its name, or "?" if this network namespace has no such device.
    - `role`: "pod" if its packets come from a pod of this node, "tunnel" for the device of direct server
      return, else "net".
    - `link`: the first header of its packets, "ethernet" or "ip".
    - `masquerade`: the addresses with which leaving packets are masqueraded: the usual one of each family,
      then others that packets to some destinations get.
    - `ingress`, `egress`: the ids of the agent's programs, 0 for none.
    - `clsact`: "own" if the agent made it, "other" if another program did, "none" if there is none.
    - `before`: programs that run before the agent's, each with its side.
    - `orphaned`: there is no such device.
    - `xdp`: the mode of the agent's XDP program, "native" or "generic". "none" if there is none.
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
    orphaned: str = ""
    xdp: str = "none"


def devices(maps: Maps, links: Path, xdp_links: Path) -> list[DeviceRow]:
    """All devices in the map, by ifindex.

    `links`, `xdp_links`: the folders where tcx links and XDP links are pinned.

    Names and programs are read from the calling thread's network namespace. Raises Rejected if programs and
    filters cannot be read.
    """
    attached = attachments.choose(links)
    found = [(int(_IFINDEX.unpack(key)[0]), value) for key, value in maps["devices"].items()]
    running = xdp.running((ifindex for ifindex, _ in found), xdp_links)
    others: dict[int, list[Address]] = {}
    for key, address in source_addresses.read(maps).items():
        others.setdefault(key.ifindex, []).append(address)
    return [
        _device(ifindex, value, attached, running.get(ifindex, _NONE), sorted(others.get(ifindex, ())))
        for ifindex, value in sorted(found)
    ]


def _device(
    ifindex: int, value: bytes, attached: Attachments, xdp_mode: str, others: list[Address]
) -> DeviceRow:
    v4, v6, flags, _ = abi.DEVICE.unpack(value)
    addresses = dict.fromkeys((Address(v4), Address(v6), *others))
    running = {side: attached.running(ifindex, place) for side, place in SIDES.items()}
    name = _name(ifindex)
    ids = {side: found.program_id if found else 0 for side, found in running.items()}
    return DeviceRow(
        device=name,
        ifindex=ifindex,
        role=_role(flags),
        link="ip" if flags & abi.DEVICE_LAYER3 else "ethernet",
        masquerade=[format_address(each) for each in addresses if not is_unspecified(each)],
        ingress=ids[INGRESS],
        egress=ids[EGRESS],
        clsact=_clsact(ifindex, flags),
        before=[f"{side}: {other}" for side, found in running.items() if found for other in found.before],
        orphaned="no such device" if name == _UNKNOWN else "",
        xdp=xdp_mode,
    )


def _role(flags: int) -> str:
    if flags & abi.DEVICE_TUNNEL:
        return "tunnel"
    if flags & abi.DEVICE_GUEST:
        return "guest"
    return "pod" if flags & abi.DEVICE_POD else "net"


def _clsact(ifindex: int, flags: int) -> str:
    if not tc.has_clsact(ifindex):
        return "none"
    return "own" if flags & abi.DEVICE_CLSACT else "other"


def _name(ifindex: int) -> str:
    try:
        return if_indextoname(ifindex)
    except OSError:
        return _UNKNOWN
