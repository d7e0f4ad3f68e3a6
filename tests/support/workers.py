"""Runs on several workers (pytest -n 2): which tests keep together, and which begin.

A file stays on one worker, since most labs are made once for a file; so do files that share a lab. It is told
by a test's name, which is all that pytest-xdist's controller knows: its own groups would become a part of the
name, by which pytest finds no test.
"""

from collections.abc import Sequence

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TOGETHER: Sequence[str] = (
    "tests/vm/",
    "tests/kernel/test_benches.py",
    "tests/kernel/test_node_",
    "tests/kernel/test_packet_",
    "tests/kernel/test_socket_",
    "tests/kernel/floods/",
)
"""Beginnings of files' names: each stands for tests that one worker runs, one after the other."""
FIRST = (*TOGETHER, "tests/kernel/test_agent_", "tests/deploy/")
"""Beginnings of the names of what takes minutes, in the order in which it is begun: else a worker might have
it to itself in the end."""


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker that has nothing left the next group of files."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=_turn), last=False)
        super()._assign_work_unit(node)


def group_of(nodeid: str) -> str:
    """One of TOGETHER, or the file itself.

    >>> group_of("tests/kernel/test_socket_lb.py::test_a_pod[v4]")
    'tests/kernel/test_socket_'
    >>> group_of("tests/kernel/test_tc.py::test_a_filter")
    'tests/kernel/test_tc.py'
    """
    file = nodeid.partition("::")[0]
    return next((name for name in TOGETHER if file.startswith(name)), file)


def _turn(group: str) -> int:
    """Those of the same turn keep their order."""
    return next((turn for turn, name in enumerate(FIRST) if group.startswith(name)), len(FIRST))
