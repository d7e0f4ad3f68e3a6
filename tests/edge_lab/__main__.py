"""Fail over between two edges with real BGP sessions, and count lost connections: `make edge-lab`.

It drains an edge, unplugs its link, and loses all packets of its machine, each while connections are open
through both edges and new ones are opened. With --forwarding=dsr no connection may be lost: the exit code is
1 if one is.
"""

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.lab import Lab, PodNetwork
from tests.edge_lab.load import NewConnections, OpenConnections
from tests.edge_lab.testbed import EdgeTestbed

NUMBER = 82
SETTLING = 3.0  # seconds from the change of the route to the end of a measurement
ANSWER = 30.0  # seconds in which open connections must answer, with retransmissions


class Result(NamedTuple):
    """`lost`: the number of open connections by error, as in Answers. `failover`: seconds from the event to
    the last new connection that failed, 0 if none did.
    """

    event: str
    open: int
    lost: Counter[str]
    tried: int
    failed: int
    failover: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.edge_lab", description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000, help="open connections (default 10000)")
    parser.add_argument("--forwarding", choices=("snat", "dsr"), default="snat", help="default snat")
    parser.add_argument("--slow", action="store_true", help="long timers, for an emulated machine")
    options = parser.parse_args(arguments)
    is_dsr = options.forwarding == "dsr"
    lost = 0
    print(
        f"two edges, forwarding {options.forwarding}, maglev, {options.connections} open connections",
        flush=True,
    )
    print("| event | open | lost | new | failed | failover (s) |\n|---|---|---|---|---|---|")
    for result in measure(options.connections, dsr=is_dsr, slow=options.slow):
        lost += result.lost.total()
        print(
            f"| {result.event} | {result.open} | {result.lost.total()} {_shown(result.lost)} "
            f"| {result.tried} | {result.failed} | {result.failover:.2f} |",
            flush=True,
        )
    return int(is_dsr and lost > 0)


def measure(connections: int, *, dsr: bool, slow: bool) -> Iterator[Result]:
    """Yield the result of each event."""
    with Lab("edges", NUMBER, PodNetwork.ROUTED, edges=2) as lab:
        testbed = EdgeTestbed(lab, dsr=dsr, slow=slow)
        events: dict[str, Callable[[int], contextlib.AbstractContextManager[float]]] = {
            "drain": testbed.drained,
            "link down": testbed.unplugged,
            "machine fails silently": testbed.silent,
        }
        opened = OpenConnections(lab.outside, testbed.sources, testbed.targets, connections)
        dialed = NewConnections(lab.outside, testbed.targets[0])
        for name, event in events.items():
            yield _fail_over(name, testbed, event, opened, dialed)
            testbed.await_edges(len(lab.edges))


def _fail_over(
    name: str,
    testbed: EdgeTestbed,
    event: Callable[[int], contextlib.AbstractContextManager[float]],
    opened: OpenConnections,
    dialed: NewConnections,
) -> Result:
    before = opened.open()
    checked = opened.check(ANSWER)
    if before.lost or checked.lost:
        lost = f"before the event, {before.lost} connections failed and {checked.lost} were lost"
        raise RuntimeError(f"{lost} {_shown(before.errors + checked.errors)}: on a busy machine, use --slow")
    dialed.start()
    time.sleep(1.0)
    with event(0) as moment:
        testbed.await_edges(1)
        time.sleep(SETTLING)
        attempts = dialed.stop()
        after = opened.check(ANSWER)
    opened.close()
    failover = attempts.last - moment if attempts.failed else 0.0
    return Result(name, before.alive, after.errors, attempts.tried, attempts.failed, max(0.0, failover))


def _shown(errors: Counter[str]) -> str:
    """Return a number of errors, or "" for none.

    >>> _shown(Counter({"ETIMEDOUT": 3, "no answer": 1}))
    '(3 ETIMEDOUT, 1 no answer)'
    """
    return f"({', '.join(f'{n} {error}' for error, n in errors.most_common())})" if errors else ""


if __name__ == "__main__":
    sys.exit(main())
