"""Entries of backend ebpf as text: the contents of the maps, without ids and slots."""

from collections.abc import Iterator

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import DeviceEntry, DeviceKey, ServicePortEntry, ServicePortKey, render
from ebpfproxy.model.address import (
    Network,
    Protocol,
    format_address,
    format_endpoint,
    format_network,
    is_unspecified,
)
from tests.golden.situation import Situation

_WEIGHT_SHIFT = abi.CONSTANTS["ENDPOINT_WEIGHT_SHIFT"]


def ebpf_text(situation: Situation) -> str:
    """A block for each ServicePort, one for local networks, one for devices; flags are named as in abi.h."""
    entries = render(situation.plans, situation.node_plan, ())
    blocks = []
    for key, entry in entries.items():
        if isinstance(key, ServicePortKey) and isinstance(entry, ServicePortEntry):
            blocks.append("\n".join(_service_port(key, entry)))
    local = sorted(key for key in entries if isinstance(key, Network))
    networks = [f"  {format_network(net)} {_flags('NETWORK_', entries[net])}" for net in local]
    blocks = [*sorted(blocks), "\n".join(["local networks", *networks])]
    devices = [_device(key, entry) for key, entry in entries.items() if isinstance(key, DeviceKey)]
    if devices:
        blocks.append("\n".join(["devices", *devices]))
    return "\n\n".join(blocks) + "\n"


def _service_port(key: ServicePortKey, entry: ServicePortEntry) -> Iterator[str]:
    affinity = f", affinity {entry.affinity_timeout} s" if entry.affinity_timeout else ""
    algorithm = f", {abi.ALGORITHMS[entry.algorithm]}" if entry.algorithm else ""
    slow_start = f", slow start {entry.slow_start} s" if entry.slow_start else ""
    yield f"{key.name} {key.protocol.name} {key.family.value}{affinity}{algorithm}{slow_start}"
    for each in entry.frontends:
        frontend = f"{format_endpoint(each.address, each.port)}/{Protocol(each.protocol).name}"
        yield f"  {abi.KINDS[each.kind]} {frontend} {_flags('SERVICE_', each.flags)}".rstrip()
    if entry.source_ranges:
        yield f"  restricted to {', '.join(map(format_network, entry.source_ranges))}"
    for endpoint, flags in zip(entry.endpoints, entry.endpoints.flags(), strict=True):
        target = format_endpoint(endpoint.address, endpoint.port)
        weight = flags >> _WEIGHT_SHIFT
        shown = _flags("ENDPOINT_", flags & (1 << _WEIGHT_SHIFT) - 1)
        yield f"  endpoint {target} {shown}{f' weight {weight}' if weight else ''}"


def _device(key: DeviceKey, entry: object) -> str:
    assert isinstance(entry, DeviceEntry)
    addresses = [format_address(each) for each in (entry.v4, entry.v6) if not is_unspecified(each)]
    parts = [key.name, *entry.sides, _flags("DEVICE_", entry.flags)]
    masquerade = f", masquerade {' '.join(addresses)}" if addresses else ""
    return f"  {' '.join(filter(None, parts))}{masquerade}"


def _flags(prefix: str, flags: object) -> str:
    """The names of the flags that are set, without their prefix and in lower case."""
    assert isinstance(flags, int)
    named = {name: bit for name, bit in abi.CONSTANTS.items() if name.startswith(prefix)}
    for number in "SERVICE_NAME_SIZE", "ENDPOINT_WEIGHT_SHIFT":
        named.pop(number, None)
    assert not flags & ~sum(named.values())
    return " ".join(name.removeprefix(prefix).lower() for name, bit in named.items() if flags & bit)
