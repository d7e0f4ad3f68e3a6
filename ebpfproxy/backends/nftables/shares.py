"""The share of new connections that each endpoint of a Service gets."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.linux.nft.draws import Draw
from ebpfproxy.linux.nft.statements import Share
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.balancing import PlannedBalancing
from ebpfproxy.plan.planned_endpoints import PlannedEndpoint
from ebpfproxy.plan.weights import interleaved, reduced

DRAWS = {
    Algorithm.RANDOM: Draw.RANDOM,
    Algorithm.ROUND_ROBIN: Draw.IN_TURN,
    Algorithm.SOURCE_HASH: Draw.BY_SOURCE,
}
"""The algorithms that rules can have. No rule knows how many connections an endpoint has."""


class Shares(NamedTuple):
    """The endpoints of one scope, each with its weight. Not empty. The weights have no common divisor."""

    draw: Draw
    endpoints: list[PlannedEndpoint]
    weights: list[int]

    @property
    def places(self) -> Sequence[PlannedEndpoint]:
        """The list that a place is drawn from: each endpoint as often as its weight, evenly spread.

        With equal weights, it is the list of endpoints.
        """
        if len(self.endpoints) == sum(self.weights):
            return self.endpoints
        return [self.endpoints[number] for number in interleaved(self.weights)]

    def conditions(self, family: str) -> Iterator[tuple[PlannedEndpoint, tuple[Share, ...]]]:
        """Yield each endpoint, and the condition of a rule that selects it if no rule before did.

        By chance or in turn, each rule draws for the packets that remain. The hash is the same in all rules.
        """
        total = remaining = sum(self.weights)
        for endpoint, weight in zip(self.endpoints, self.weights, strict=True):
            if weight == remaining:
                yield endpoint, ()
            elif self.draw is Draw.BY_SOURCE:
                yield endpoint, (Share(family, total, total - remaining + weight, self.draw),)
            else:
                yield endpoint, (Share(family, remaining, weight, self.draw),)
            remaining -= weight


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
