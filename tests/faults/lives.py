"""One process: it opens a mode, syncs random states while calls fail, and may be killed.

After each state the faults end. Then the mode must reach the desired state, and keep its file descriptors.
"""

import contextlib
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from ebpfproxy.plan.service_plan import NodePlan
from tests.faults import points
from tests.faults.clusters import ADDRESSES, PORT, Clusters
from tests.faults.injector import Injector
from tests.kernel.clients import first_to_answer

_ATTEMPTS = 3  # syncs of one state while calls fail
_SETTLED = 30.0  # seconds within which a mode must be in sync without faults
_PAUSE, _LONGEST_PAUSE = 0.01, 1.0  # seconds between two syncs; the agent waits longer
_OPENINGS = 4
_OPEN = Path("/proc/self/fd")
_NAMED = 8  # keys in a finding
_SPARE_DESCRIPTORS = 6  # threads open files for a moment


class Plan(NamedTuple):
    """The faults of one life: `rate` is the share of failing calls, `kill_at` the call at which it ends."""

    seed: str
    steps: int
    rate: float
    kill_at: int


class Life:
    def __init__(
        self,
        mode: Mode,
        config: Config,
        plan: Plan,
        files: tuple[Path, Path],
        make: Callable[[], Clusters],
    ) -> None:
        """`files`: the journal, and the entries of a node without Services as the first life rendered them:
        a fault while a mode is opened must not change what it serves."""
        journal, self._reference = files
        descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._faults = Injector(plan.seed, descriptor, plan.rate, plan.kill_at)
        self._mode = mode
        self._config = config
        self._plan = plan
        self._clusters = make()
        self._descriptors = 0
        threading.excepthook = lambda given: self._find(f"thread {given.thread}", given.exc_value)
        points.install(self._faults, Path(config.bpffs_root))

    def run(self) -> None:
        serving = self._opened()
        serving.plan_all(self._clusters.state)
        self._compare_entries(serving)
        for number in range(self._plan.steps):
            if number:
                change = self._clusters.next()
                serving.reconciler.plan(change.state, change.services, node_changed=False, host_changed=False)
            self._sync(serving, first=number == 0)
            self._settle(serving)
            self._faults.note("step", points=self._faults.points)
        with self._expecting("close"), self._faults.armed():
            serving.close()

    def _opened(self) -> ActiveMode:
        """Open the mode. After an error the agent ends, and the kubelet starts it again."""
        for _ in range(_OPENINGS):
            before = _descriptors()
            with self._expecting("open"), self._faults.armed():
                serving = ActiveMode(self._mode, self._config, _callbacks())
                try:
                    serving.open()
                except BaseException:
                    serving.close()
                    raise
                return serving
            if before < (after := _descriptors()):
                opened = sorted(map(_target, _OPEN.iterdir()))
                self._faults.note("finding", where="failed open", what=f"{before} to {after}: {opened}")
        serving = ActiveMode(self._mode, self._config, _callbacks())
        serving.open()
        return serving

    def _compare_entries(self, serving: ActiveMode) -> None:
        backend = serving.reconciler._backend
        rendered = "\n".join(sorted(map(repr, backend.render((), NodePlan()).items())))
        if not self._reference.exists():
            self._reference.write_text(rendered)
        if self._reference.read_text() != rendered:
            self._faults.note("finding", where="open", what="after a fault it serves other entries")

    def _sync(self, serving: ActiveMode, *, first: bool) -> None:
        """Do what the agent does until its next change, while calls fail."""
        verify = first
        for _ in range(_ATTEMPTS):
            done = False
            with self._expecting("sync"), self._faults.armed():
                result = serving.sync(verify)
                done = not result.rejected
            verify = True
            if done:
                break
        with self._expecting("check"), self._faults.armed():
            serving.maintain()
            serving.reconciler.is_modified_externally()
            all(serving.reconciler.check())

    def _settle(self, serving: ActiveMode) -> None:
        """Without faults, the mode must be in sync soon, and a verification must find no difference."""
        self._compare_record(serving)
        deadline, pause = time.monotonic() + _SETTLED, _PAUSE
        last = ""
        while time.monotonic() < deadline:
            try:
                result = serving.sync(verify=True)
                last = str(result)
                if not (result.put or result.dropped or result.rejected):
                    break
            except KernelError as failure:
                last = failure.message
            except Exception as failure:
                self._find("sync without faults", failure)
                last = repr(failure)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            self._faults.note("finding", where="not in sync", what=str(last))
            raise AssertionError(f"not in sync: {last}")
        if not all(serving.reconciler.check()):
            self._faults.note("finding", where="check", what="differs although a sync found no difference")
        if serving.reconciler.is_modified_externally():  # it may differ without need, but not permanently
            serving.sync(verify=True)
            if serving.reconciler.is_modified_externally():
                self._faults.note("finding", where="generation", what="differs although nothing changed")
        self._count_descriptors()
        self._connect()

    def _connect(self) -> None:
        """The node reaches the Service whose endpoints are healthy. Relays of a process that was killed may
        accept a connection until they have noticed."""
        for address in ADDRESSES:
            try:
                first_to_answer(address, PORT, _SETTLED)
            except TimeoutError as failure:
                self._find("connection", failure)

    def _compare_record(self, serving: ActiveMode) -> None:
        """What the agent recorded must be in the kernel, unless it notices that it must read everything."""
        reconciler = serving.reconciler
        try:
            if serving.sync(verify=False).rejected or reconciler.is_modified_externally():
                return
            recorded = reconciler._actual or {}
            difference = diff(reconciler._backend.read(), recorded)
            result = serving.sync(verify=True)
        except KernelError:
            return
        # The difference counts, too: the first read may have repaired it.
        if difference or result.put or result.dropped or result.drifted:
            keys = sorted(map(str, (*difference.puts, *difference.drops)))[:_NAMED]
            self._faults.note("finding", where="record", what=f"not what the kernel has: {result}", keys=keys)

    def _count_descriptors(self) -> None:
        count = _descriptors()
        if not self._descriptors:
            self._descriptors = count + _SPARE_DESCRIPTORS
        elif count > self._descriptors:
            opened = sorted(map(_target, _OPEN.iterdir()))
            self._faults.note("finding", where="descriptors", what=f"{count}: {opened}")
            self._descriptors = count + _SPARE_DESCRIPTORS

    @contextlib.contextmanager
    def _expecting(self, where: str) -> Iterator[None]:
        """Suppress errors of the kernel, which the agent handles. Record all others."""
        try:
            yield
        except KernelError:
            pass
        except Exception as failure:
            self._find(where, failure)

    def _find(self, where: str, failure: BaseException | None) -> None:
        trace = traceback.extract_tb(failure.__traceback__) if failure else ()
        own = [f"{each.filename.rpartition('ebpfproxy/')[2]}:{each.lineno}" for each in trace]
        self._faults.note("finding", where=where, what=repr(failure), trace=own[-8:])


def _descriptors() -> int:
    gc.collect()
    return len(list(_OPEN.iterdir()))


def _callbacks() -> Callbacks:
    return Callbacks()


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return "closed"
