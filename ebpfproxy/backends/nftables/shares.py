"""The share of new connections that each endpoint of a Service gets."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.linux.nft.draws import HASHES, Draw
from ebpfproxy.model.address import Address, Family, family
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan import maglev
from ebpfproxy.plan.balancing import PlannedBalancing
from ebpfproxy.plan.maglev import TableSizes
from ebpfproxy.plan.planned_endpoints import PlannedEndpoint, target_of
from ebpfproxy.plan.weights import interleaved, reduced

DRAWS = {
    Algorithm.RANDOM: Draw.RANDOM,
    Algorithm.ROUND_ROBIN: Draw.IN_TURN,
    Algorithm.SOURCE_HASH: Draw.BY_SOURCE,
    Algorithm.MAGLEV: Draw.BY_FLOW,
}
"""The algorithms that rules can have. No rule knows how many connections an endpoint has."""


TABLE_SIZES = TableSizes((251, 1021, 4093, 16381), 16)
"""Of the tables of `maglev`. Each entry is an element of a map, which takes nine times the memory of a slot
in mode ebpf (docs/decisions/0046-algorithms-in-lists-of-slots.md)."""


class Shares(NamedTuple):
    """The endpoints of one scope, each with its weight. Not empty. The weights have no common divisor."""

    draw: Draw
    endpoints: list[PlannedEndpoint]
    weights: list[int]

    @property
    def places(self) -> Sequence[PlannedEndpoint]:
        """The list that a place is drawn from: each endpoint as often as its weight, evenly spread.

        With equal weights, it is the list of endpoints. With `maglev` it is a table.
        """
        if self.draw is Draw.BY_FLOW and len(self.endpoints) > 1:
            size = TABLE_SIZES.of(len(self.endpoints), sum(self.weights))
            targets = [target_of(each.address, each.port) for each in self.endpoints]
            return [self.endpoints[number] for number in maglev.table(targets, self.weights, size)]
        if len(self.endpoints) == sum(self.weights):
            return self.endpoints
        return [self.endpoints[number] for number in interleaved(self.weights)]

    def conditions(self, family: str) -> Iterator[tuple[PlannedEndpoint, str]]:
        """Yield each endpoint, and the condition of a rule that selects it if no rule before did.

        The condition has a space at its end. It is "" for the last endpoint.

        By chance or in turn, each rule draws for the packets that remain. The hash is the same in all rules.
        """
        total = remaining = sum(self.weights)
        for endpoint, weight in zip(self.endpoints, self.weights, strict=True):
            is_hash = self.draw in HASHES
            limit = total - remaining + weight if is_hash else weight
            drawn = self.draw.text(family, total if is_hash else remaining)
            yield endpoint, f"{drawn} {f'< {limit}' if limit > 1 else 0} " if weight < remaining else ""
            remaining -= weight

    def selected(self, client: Address, port: int, has_affinity: bool) -> PlannedEndpoint:
        """Return the endpoint of a client that is not known yet. `port`: its source port.

        With session affinity, `conditions` divide the hash, without it `places`. Raises ValueError if no hash
        selects the endpoint.
        """
        order = self._in_sequence() if has_affinity else self.places
        source = client[12:] if family(client) is Family.IPV4 else client
        return order[self.draw.number(source, port, len(order))]

    def _in_sequence(self) -> Sequence[PlannedEndpoint]:
        pairs = zip(self.endpoints, self.weights, strict=True)
        return [endpoint for endpoint, weight in pairs for _ in range(weight)]


def shares(
    endpoints: Sequence[PlannedEndpoint],
    balancing: PlannedBalancing,
    is_usable: Callable[[PlannedEndpoint], bool],
) -> Shares | None:
    """Return the shares of the usable endpoints; None if there are none.

    An algorithm that rules cannot have counts as the default.
    """
    usable = [each for each in endpoints if is_usable(each)]
    if not usable:
        return None
    draw = DRAWS.get(balancing.algorithm or Algorithm.RANDOM, Draw.RANDOM)
    if not balancing.weights:
        return Shares(draw, usable, [1] * len(usable))
    pairs = zip(endpoints, balancing.weights, strict=True)
    weights = [weight for each, weight in pairs if is_usable(each)]
    return Shares(draw, usable, reduced(weights))
