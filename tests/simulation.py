"""Simulates the rebalancing of connections on many nodes, and prints a table.

    python -m tests.simulation

Each node has its own connections to a Service whose endpoints double. Clients whose connection is reset
connect again after up to some seconds. `steered`: the rule of plan/rebalancing.py. `random`: each node resets
connections of endpoints above its own mean, and clients get any endpoint.
"""

import random
import statistics
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.plan.rebalancing import STEP, Rebalancing

MINUTES = 40
PERCENT = 10
_RECONNECT = 5.0  # seconds within which clients connect again


class Outcome(NamedTuple):
    """`lowest` and `highest`: the connections of an endpoint at the end, relative to the mean. `minutes`:
    after which each endpoint had 85 to 115 % of the mean for the first time, None if never. `late`: resets
    after ten minutes.
    """

    resets: int
    minimum: int
    lowest: float
    highest: float
    minutes: float | None
    late: int


class _Node:
    def __init__(self, number: int, connections: int, old: int, new: int, chance: random.Random) -> None:
        self.seed = f"node-{number}".encode()
        self.targets = [b"endpoint-%d" % each for each in range(old + new)]
        self.counts = Counter(chance.choice(self.targets[:old]) for _ in range(connections))
        self.waiting: list[float] = []
        self.rule: Rebalancing | None = Rebalancing(PERCENT, self.seed, self.targets[old:], 0.0)
        self.full: frozenset[bytes] = frozenset()


def _steered(node: _Node, now: float, chance: random.Random) -> Counter[bytes]:
    if not node.rule:
        return Counter()
    moving = Counter(node.rule.step(node.counts, node.targets, node.full, now))
    node.full = node.rule.full
    if node.rule.has_ended:
        node.rule = None
    return moving


def _random(node: _Node, now: float, chance: random.Random) -> Counter[bytes]:
    total = sum(node.counts.values())
    mean = total / len(node.targets)
    above = [each for each in node.targets for _ in range(node.counts[each]) if node.counts[each] > mean]
    wanted = total * PERCENT / 100 * STEP / 60
    number = int(wanted) + (chance.random() < wanted % 1)
    return Counter(chance.sample(above, min(number, len(above))))


POLICIES: dict[str, Callable[[_Node, float, random.Random], Counter[bytes]]] = {
    "steered": _steered,
    "random": _random,
}


def simulate(policy: str, nodes: int, connections: int, old: int = 5, new: int = 5, seed: int = 1) -> Outcome:
    """`connections`: of each node, to the `old` endpoints, when the `new` ones are added."""
    chance = random.Random(seed)
    all_nodes = [_Node(number, connections, old, new, chance) for number in range(nodes)]
    targets = all_nodes[0].targets
    total = nodes * connections
    resets = late = 0
    minutes: float | None = None
    steps = int(MINUTES * 60 / STEP)
    for number in range(steps):
        now = number * STEP
        for node in all_nodes:
            for at in [at for at in node.waiting if at <= now]:
                node.waiting.remove(at)
                usable = [each for each in targets if each not in node.full] or targets
                node.counts[chance.choice(usable)] += 1
            moving = POLICIES[policy](node, now, chance)
            node.counts -= moving
            moved = moving.total()
            resets += moved
            late += moved if now > 600 else 0
            node.waiting += [now + chance.uniform(0, _RECONNECT) for _ in range(moved)]
        shares = _shares(all_nodes, targets, total)
        if minutes is None and min(shares) >= 0.85 and max(shares) <= 1.15:
            minutes = now / 60
    shares = _shares(all_nodes, targets, total)
    return Outcome(resets, total * new // (old + new), min(shares), max(shares), minutes, late)


def _shares(nodes: list[_Node], targets: list[bytes], total: int) -> list[float]:
    sums = Counter[bytes]()
    for node in nodes:
        sums.update(node.counts)
    mean = total / len(targets)
    return [sums[each] / mean for each in targets]


def main() -> None:
    print(
        "| nodes × connections | policy | resets / minimum | after 10 min | each endpoint within 15 % after "
        "| lowest; highest at the end |"
    )
    print("|---|---|---|---|---|---|")
    for nodes, connections in ((1, 1000), (10, 100), (100, 100), (100, 10), (100, 3), (1000, 1)):
        for policy in POLICIES:
            of = [simulate(policy, nodes, connections, seed=seed) for seed in range(5)]
            resets = statistics.mean(each.resets / each.minimum for each in of)
            late = statistics.mean(each.late / each.minimum for each in of)
            even = [each.minutes for each in of]
            slowest = "never" if None in even else f"{max(each or 0.0 for each in even):.1f} min"
            lowest, highest = min(each.lowest for each in of), max(each.highest for each in of)
            print(
                f"| {nodes} × {connections} | {policy} | {resets:.2f} | {late:.2f} | {slowest} "
                f"| {lowest:.2f}; {highest:.2f} |"
            )


if __name__ == "__main__":
    main()
