"""The source addresses of a device with several: what the kernel selects for which packets.

- By a route with a preferred source: that address.
- Other packets of IPv4: the first address that has the next hop in its network, else the first address
  (inet_select_addr()).
- Other packets of IPv6: a unique local address for unique local destinations, and a global one for others. Of
  several, the one with the longest common prefix with the destination (RFC 6724, ipv6_dev_get_saddr()).

Policy routing and more specific routes without a preferred source by the same gateway are not covered.
"""

from collections.abc import Iterator, Sequence

from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    contains,
    family,
    network,
    parse_network,
    unspecified,
)
from ebpfproxy.model.device import Device
from ebpfproxy.plan.service_plan import By, Source

_UNIQUE_LOCAL = parse_network("fc00::/7")
_ANY = Network(unspecified(Family.IPV6), 0)
_BITS = 128


def plan_sources(device: Device, usual: Sequence[Address | None]) -> tuple[Source, ...]:
    """Return which source address belongs to which network, sorted. Empty if each is one of `usual`, the
    address of each family that packets get without it."""
    found: dict[tuple[By, Network], Address] = {}
    for net, address in (*device.preferred, *_of(device, Family.IPV4)):
        found.setdefault((By.NEXT_HOP, net), address)
    for net, address in _by_destination(list(_of(device, Family.IPV6))):
        found.setdefault((By.DESTINATION, net), address)
    if all(address in usual for address in found.values()):
        return ()
    sources = (Source(*key, address) for key, address in found.items())
    return tuple(sorted(sources, key=lambda each: (each.by.value, each.network)))


def source_for(sources: Sequence[Source], next_hop: Address, destination: Address) -> Address | None:
    """Return the source of a packet, as the programs find it (bpf/masquerade.h). None if no network applies.

    `next_hop`: the destination of a route without a gateway."""
    for by, address in ((By.NEXT_HOP, next_hop), (By.DESTINATION, destination)):
        matching = [each for each in sources if each.by is by and contains(each.network, address)]
        if matching:
            found = max(matching, key=lambda each: each.network.length).address
            return found if family(found) is family(destination) else None
    return None


def _of(device: Device, ip_family: Family) -> Iterator[tuple[Network, Address]]:
    return (each for each in device.connected if family(each[1]) is ip_family)


def _by_destination(
    connected: Sequence[tuple[Network, Address]],
) -> Iterator[tuple[Network, Address]]:
    """Yield the address for each network of IPv6 destinations. The first of a network applies.

    Rules 6 (matching label) and 8 (longest matching prefix) of RFC 6724 section 5.
    """
    local = [each for each in connected if contains(_UNIQUE_LOCAL, each[1])]
    others = [each for each in connected if each not in local]
    for net, pool in ((_UNIQUE_LOCAL, local or others), (_ANY, others or local)):
        for _, address in pool[:1]:
            yield net, address
        for own, address in pool:
            for _, other in pool:
                common = _common_bits(address, other)
                if common < own.length:  # beyond it, the addresses match equally
                    yield network(address, common + 1), address


def _common_bits(one: Address, other: Address) -> int:
    """Return the length of the longest common prefix: 128 for equal addresses."""
    return _BITS - (int.from_bytes(one) ^ int.from_bytes(other)).bit_length()
