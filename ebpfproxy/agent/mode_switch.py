"""Keeps one mode at work, moves to another, and has what the others left taken away."""

import dataclasses
import time
from collections.abc import Callable

from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.agent.mode_cleanup import ModeCleanup
from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.backends.mode import Callbacks, Mode
from ebpfproxy.backends.selection import AUTO, MODES, Choice, Lack, choose
from ebpfproxy.config import Config
from ebpfproxy.errors import AlreadyExists, KernelError, ProgramRejected, Rejected, Unsupported
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.linux.locks import NamespaceLock
from ebpfproxy.log import Logger
from ebpfproxy.model.cluster import ClusterState

log = Logger(__name__)

SWITCHING = "Switching mode"
"""The other mode is opened and programmed beside the current one."""
SWITCHED = "Switched mode"
"""The other mode is in force; objects of the previous one are removed next."""
SWITCH_FAILED = "Failed to switch mode, keeping the current one"
"""`reason` is what failed in the other mode."""
SAME_MODE = "Mode is unchanged"
"""The changed configuration names, or selects, the current mode."""
LOOK_FAILED = "Cannot look for changes of other programs"
"""Everything is read back instead."""
SWITCH_LATER = "Switching mode after the first sync"
"""The configuration changed before there was anything to switch with."""
RESYNC_FAILED = "Resync after a failed switch failed, retrying"
"""The other mode may have changed objects that both modes share."""

SELECTED = "Selected proxy mode"
"""The mode is open, and its first sync is next."""
UNAVAILABLE = "Proxy mode unavailable"
"""`auto` passed over this mode: a warning where a probe finds something missing, an error where the mode
failed although its probes succeeded. Logged once for each mode and reason."""

_ATTEMPTS = 3  # first syncs that fail before `auto` leaves a mode: others may hold a lock for a moment
_PATIENCE = 5.0  # seconds for an agent that is about to end, as at a DaemonSet's update


class ModeSwitcher:
    """For the thread that owns the state; others may read what is `serving`."""

    def __init__(self, config: Config, callbacks: Callbacks, metrics: Metrics) -> None:
        """Raises KernelError where no mode works here, or the one that is asked for does not."""
        self.config = config
        """What the mode that serves was made with; of its name, what it was last chosen by. For the thread
        that owns the state."""
        self._callbacks = callbacks
        self._metrics = metrics
        self._failed: dict[str, Lack] = {}  # modes that `auto` does not take any more, by name
        self._reported: set[tuple[str, Lack]] = set()
        self._first_syncs = 0  # that failed, of the mode that serves
        self._committed = False  # `auto` stays with the mode: a sync has succeeded, or no other mode works
        self.serving = self._prepare_usable()
        self._mode_cleanup = ModeCleanup(config, metrics.drained)
        self.asked: Config | None = None  # what is to be followed when a sync has succeeded
        self._last: SyncResult | None = None
        self._lock: NamespaceLock | None = None

    def open(self) -> None:
        """With `auto`, a mode that fails is left for the next one.

        Raises AlreadyExists where another agent has this network namespace or these pins, or any KernelError
        where the mode that the configuration names fails, or no mode works.
        """
        while True:
            try:
                self._own(self.serving)
                self.serving.open()
                break
            except AlreadyExists:
                raise
            except KernelError as failure:
                self.serving.close()
                self._leave(self.serving.name, failure)
            self.serving = self._prepare_usable()
        self._first_syncs = 0
        self._metrics.mode(self.serving.name)
        log.info(SELECTED, mode=self.serving.name, configured=self.config.proxy_mode)

    def leave_failing(self, failure: KernelError, state_now: Callable[[], ClusterState]) -> None:
        """After a sync that failed: with `auto`, leave a mode that has never synced for the next one, which
        gets all of the state. A failure that stays one is reason at once, any other after _ATTEMPTS syncs.

        Pins that another agent has are none. Where no other mode works, this one stays. Raises KernelError
        where that shows only afterwards.
        """
        self._first_syncs += 1
        final = isinstance(failure, ProgramRejected | Unsupported)
        if self._committed or self.config.proxy_mode != AUTO or isinstance(failure, AlreadyExists):
            return
        if self._first_syncs < _ATTEMPTS and not final:
            return
        previous = self.serving
        failed = self._failed | {previous.name: Lack(failure.message, failure.hint)}
        try:
            choose(self.config, failed=failed)
        except Unsupported:
            self._committed = True
            return
        previous.close()
        self._leave(previous.name, failure)
        self.serving = self._prepare_usable()
        self.open()
        self.serving.plan_all(state_now())

    def close(self) -> None:
        self._mode_cleanup.close()
        self.serving.close()
        if self._lock:
            self._lock.release()

    def sync(self, verify: bool) -> SyncResult:
        """As `Reconciler.sync`; after the first that succeeded, what other modes left goes.

        With `auto`, a first sync after which the mode forwards nothing is a failure.
        """
        done = self.serving.sync(verify)
        lacking = None if self._committed else self.serving.lacking()
        if lacking and self.config.proxy_mode == AUTO:
            raise lacking
        self._committed = True
        if self._last is None:
            self._drain_others()
        self._last = done
        return done

    def is_disturbed(self) -> bool:
        """Whether another program has changed what the mode keeps in the kernel."""
        try:
            return self.serving.proxier.is_disturbed()
        except KernelError as failure:  # what it is will show when all is read
            log.warning(LOOK_FAILED, reason=failure.message, hint=failure.hint)
            return True

    def follow(self, config: Config, state_now: Callable[[], ClusterState]) -> bool:
        """Move to the mode that this configuration asks for, with all of the state, if it is another one.

        Whether the mode that serves then is in step; where it is not, a sync is wanted soon.

        Where that does not work, the present one continues. Before the first sync there is nothing to move
        with: then the configuration is `asked`, and it is for the caller to come back with it.
        """
        self.asked = None
        try:
            choice = choose(config, failed=self._failed)
        except KernelError as failure:
            log.error(SWITCH_FAILED, reason=failure.message, hint=failure.hint)
            return True
        if choice.mode.name == self.serving.name:
            log.info(SAME_MODE, mode=self.serving.name)
            self.config = dataclasses.replace(self.config, proxy_mode=config.proxy_mode)
        elif self._last is None:
            log.info(SWITCH_LATER, mode=choice.mode.name)
            self.asked = config
        else:
            return self._move(choice, config, state_now)
        return True

    def _move(self, choice: Choice, config: Config, state_now: Callable[[], ClusterState]) -> bool:
        began = time.monotonic()
        log.info(SWITCHING, mode=self.serving.name, other=choice.mode.name)
        with self._mode_cleanup.spare(choice.mode):
            try:
                new, done = self._begin(choice, config, state_now)
            except KernelError as failure:
                return self._stay(choice.mode, failure)
            previous, self.serving, self._last = self.serving, new, done
            self._failed.pop(new.name, None)
            self.config = config
            self._metrics.mode(new.name)
            previous.close()
            self._drain_others()
        log.info(SWITCHED, mode=new.name, duration_ms=round(1000 * (time.monotonic() - began), 3))
        return True

    def _begin(
        self, choice: Choice, config: Config, state_now: Callable[[], ClusterState]
    ) -> tuple[ActiveMode, SyncResult]:
        """The other mode at work beside this one. Raises KernelError; then it is not."""
        new = self._prepare(choice, config)
        self._own(new)
        try:
            done = new.take_over(state_now)
            if self._last and done.rejected > self._last.rejected:
                raise Rejected(f"mode {new.name}: the kernel rejects {done.rejected} entries there")
        except KernelError:
            new.close()
            raise
        return new, done

    def _own(self, serving: ActiveMode) -> None:
        if serving.owns_namespace and self._lock is None:
            self._lock = NamespaceLock(_PATIENCE)

    def _stay(self, other: Mode, failure: KernelError) -> bool:
        log.error(
            SWITCH_FAILED,
            mode=self.serving.name,
            other=other.name,
            reason=failure.message,
            hint=failure.hint,
        )
        self._metrics.switch_failed(other.name)
        try:
            self._last = self.serving.sync(verify=True)  # the other one may have taken common chains
        except KernelError as lost:
            log.warning(RESYNC_FAILED, mode=self.serving.name, reason=lost.message, hint=lost.hint)
            self._last = None  # the next one that succeeds has the others drained
            return False
        if self._lock:
            self._mode_cleanup.drain([other], self.serving.mode, self.config)
        return True

    def _prepare_usable(self) -> ActiveMode:
        """The mode to begin with. Raises KernelError where none can be prepared."""
        while True:
            choice = choose(self.config, failed=self._failed)
            try:
                return self._prepare(choice, self.config)
            except KernelError as failure:
                self._leave(choice.mode.name, failure)

    def _leave(self, name: str, failure: KernelError) -> None:
        """Have `auto` take this mode no more until the next start. Within the handler of `failure`, which is
        raised again where the configuration names the mode."""
        if self.config.proxy_mode != AUTO:
            raise failure
        lack = self._failed[name] = Lack(failure.message, failure.hint)
        self._reported.add((name, lack))
        self._metrics.switch_failed(name)
        values = {"mode": name, "reason": lack.reason}
        if isinstance(failure, ProgramRejected):
            values |= {"program": failure.program, "verifier": " | ".join(failure.verifier)}
        log.error(UNAVAILABLE, **values, hint=lack.remedy)

    def _prepare(self, choice: Choice, config: Config) -> ActiveMode:
        for name, lack in choice.why_not.items():
            if (name, lack) not in self._reported:
                self._reported.add((name, lack))
                log.warning(UNAVAILABLE, mode=name, reason=lack.reason, hint=lack.remedy)
        return ActiveMode(choice.mode, config, self._callbacks)

    def _drain_others(self) -> None:
        """Not where this agent leaves the network namespace to others."""
        if self._lock is None:
            return
        serving = self.serving.mode
        others = [mode for mode in MODES if mode.name != serving.name]
        self._mode_cleanup.drain(others, serving, self.config)
