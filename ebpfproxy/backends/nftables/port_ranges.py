"""Sets of addresses in the form of nftables: overlapping and adjacent ranges are merged."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ebpfproxy.model.address import (
    V4_BITS,
    Address,
    Family,
    Network,
    format_address,
    format_network,
    network,
)

_HOST = 128


class Range(NamedTuple):
    """All addresses from `first` to `last` inclusive, as 128-bit numbers."""

    first: int
    last: int


def network_range(net: Network) -> Range:
    first = int.from_bytes(net.address)
    return Range(first, first + (1 << (_HOST - net.length)) - 1)


def is_everything(ranges: Sequence[Range], family: Family) -> bool:
    """Return whether merged `ranges` contain all addresses of the family."""
    everything = 1 << (_HOST - (V4_BITS if family is Family.IPV4 else 0))
    return len(ranges) == 1 and ranges[0].last - ranges[0].first + 1 == everything


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the same addresses in the smallest number of ranges, sorted.

    >>> merged([Range(8, 9), Range(1, 3), Range(4, 4), Range(2, 3)])
    [Range(first=1, last=4), Range(first=8, last=9)]
    """
    done: list[Range] = []
    for each in sorted(ranges):
        if done and each.first <= done[-1].last + 1:
            done[-1] = Range(done[-1].first, max(done[-1].last, each.last))
        else:
            done.append(each)
    return done


def without(ranges: Iterable[Range], excluded: Iterable[Range]) -> list[Range]:
    """Return the addresses of `ranges` that are not in `excluded`, as `merged` does.

    >>> without([Range(1, 4), Range(3, 9)], [Range(5, 6)])
    [Range(first=1, last=4), Range(first=7, last=9)]
    """
    left = merged(ranges)
    for first, last in excluded:
        parts = (
            part
            for each in left
            for part in (
                Range(each.first, min(each.last, first - 1)),
                Range(max(each.first, last + 1), each.last),
            )
        )
        left = [part for part in parts if part.first <= part.last]
    return left


def range_text(range_: Range) -> str:
    """Return an address, a CIDR if the range is one, otherwise both ends.

    >>> from ebpfproxy.model.address import parse_network
    >>> private = network_range(parse_network("10.0.0.0/24"))
    >>> range_text(private), range_text(private._replace(last=private.first + 2))
    ('10.0.0.0/24', '10.0.0.0-10.0.0.2')
    """
    first, last = Address(range_.first.to_bytes(16)), Address(range_.last.to_bytes(16))
    if first == last:
        return format_address(first)
    size = range_.last - range_.first + 1
    length = _HOST + 1 - size.bit_length()
    if size.bit_count() == 1 and network(first, length).address == first:
        return format_network(Network(first, length))
    return f"{format_address(first)}-{format_address(last)}"
