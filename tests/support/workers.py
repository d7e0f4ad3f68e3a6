"""Distribution of tests to several workers (pytest -n 6): groups that stay together, and their order.

All tests of a file run on one worker, because most labs are created once for a file; so do files that share a
lab. The group is derived from a test's name, because pytest-xdist's controller knows nothing else. Groups of
pytest-xdist itself would become a part of the name, and pytest would not find the test.
"""

from collections.abc import Sequence

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TOGETHER: Sequence[str] = (
    "tests/vm/",
    "tests/kernel/test_packet_",
    "tests/kernel/test_socket_",
    "tests/kernel/floods/",
    "tests/kernel/test_benches.py",
    "tests/kernel/test_node_",
)
"""Prefixes of file names. One worker runs all tests with the same prefix."""
FIRST = (
    *TOGETHER,
    "tests/kernel/test_agent_",
    "tests/kernel/packet_path/",
    "tests/kernel/differential/",
    "tests/kernel/zoo/",
    "tests/faults/",
    "tests/deploy/",
    "tests/kernel/test_rebalancing.py",
    "tests/kernel/test_canary.py",
    "tests/kernel/test_d",
    "tests/kernel/test_e",
    "tests/kernel/verify/",
    "tests/kernel/test_tenants.py",
    "tests/kernel/test_random_tenant.py",
    "tests/kernel/test_pod_namespaces.py",
    "tests/kernel/test_support_bundle.py",
    "tests/contract/",
    "tests/kernel/test_stale_translation.py",
    "tests/kernel/device_table/",
    "tests/kernel/service_table/",
)
"""Prefixes of slow groups in the order in which they start, the slowest first. Otherwise one worker might run
them alone at the end."""


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Assigns the next group of files to an idle worker."""

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
    """The position of a group. Groups with the same position keep their order."""
    return next((turn for turn, name in enumerate(FIRST) if group.startswith(name)), len(FIRST))
