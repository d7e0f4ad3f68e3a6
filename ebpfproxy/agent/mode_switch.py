"""The mode switcher: selects a mode, switches to another one, and has the objects of other modes removed."""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping

from ebpfproxy.agent import firewall_report
from ebpfproxy.agent.active_mode import ActiveMode, Unsettled
from ebpfproxy.agent.mode_cleanup import ModeCleanup
from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.backends.selection import AUTO, MODES, Choice, Lack, choose
from ebpfproxy.config import Config
from ebpfproxy.errors import AlreadyExists, KernelError, ProgramRejected, Rejected, Unsupported
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.linux.locks import NamespaceLock
from ebpfproxy.log import Logger
from ebpfproxy.model.cluster import ClusterState

log = Logger(__name__)

SWITCHING = "Switching mode"
"""The other mode is opened and programmed while the current one continues."""
SWITCHED = "Switched mode"
"""The other mode is in use. Objects of the previous one are removed next."""
SWITCH_FAILED = "Failed to switch mode, keeping the current one"
"""`reason` is the error of the other mode."""
SWITCH_AGAIN = "Switching mode again after the next sync, the node may have changed"
"""The switch found other entries than it had written, for example because a device was renamed meanwhile."""
SAME_MODE = "Mode is unchanged"
"""The changed configuration names or selects the current mode."""
CHECK_FAILED = "Cannot look for changes of other programs"
"""The next sync reads everything back instead."""
SWITCH_LATER = "Switching mode after the first sync"
"""The configuration changed before the first sync. The switch follows it."""
RESYNC_FAILED = "Resync after a failed switch failed, retrying"
"""The other mode may have changed objects that both modes share. A sync is retried."""

SELECTED = "Selected proxy mode"
"""The mode is open. Its first sync is next."""
UNAVAILABLE = "Proxy mode unavailable"
"""`auto` did not select this mode. A warning if a probe failed, an error if the mode failed after successful
probes. Logged once for each mode and reason."""

_MAX_ATTEMPTS = 3  # failed first syncs before `auto` gives a mode up: another process may hold a lock briefly
_MAX_SWITCHES = 5  # in a row, while the node changes
_LOCK_TIMEOUT = 5.0  # seconds to wait for an agent that is about to end, as in an update of the DaemonSet


class ModeSwitcher:
    """Owns the current mode. Only the control thread may call methods; any thread may read `serving`."""

    def __init__(
        self,
        config: Config,
        callbacks: Callbacks,
        metrics: Metrics,
        fell_back: Callable[[Mapping[str, str]], object] = lambda unavailable: None,
    ) -> None:
        """Select a mode. Raises KernelError if no mode works, or if the configured mode does not.

        `fell_back` is called when a mode is open, with the modes that `auto` prefers to it and why they are
        unavailable.
        """
        self._fell_back = fell_back
        self.config = config
        """The configuration of the current mode. `proxy_mode` is the value that last selected the mode."""
        self._callbacks = callbacks
        self._metrics = metrics
        self._failed: dict[str, Lack] = {}  # by name: modes that `auto` does not select any more
        self._reported: set[tuple[str, Lack]] = set()
        self._failed_first_syncs = 0  # of the current mode
        self._committed = False  # `auto` keeps the mode: a sync has succeeded, or no other mode works
        self._why_not: Mapping[str, Lack] = {}  # of the selected mode
        self.serving = self._prepare_usable()
        self._mode_cleanup = ModeCleanup(config, metrics.drained)
        self.pending_config: Config | None = None  # apply it after the first successful sync
        self._unsettled_switches = 0  # in a row
        self._last_result: SyncResult | None = None
        self._lock: NamespaceLock | None = None

    def open(self) -> None:
        """Open the selected mode. With `auto`, try the next mode if it fails.

        Raises AlreadyExists if another agent uses this network namespace or these pins. Raises another
        KernelError if the configured mode fails, or if no mode works.
        """
        while True:
            try:
                self._lock_namespace(self.serving)
                self.serving.open()
                break
            except AlreadyExists:
                raise
            except KernelError as failure:
                self.serving.close()
                self._exclude(self.serving.name, failure)
            self.serving = self._prepare_usable()
        self._failed_first_syncs = 0
        self._report_mode(self._why_not)
        log.info(SELECTED, mode=self.serving.name, configured=self.config.proxy_mode)

    def fall_back(self, failure: KernelError, state_now: Callable[[], ClusterState]) -> None:
        """After a failed sync with `auto`, replace a mode that has never synced by the next one.

        A permanent failure (ProgramRejected, Unsupported) replaces the mode at once, any other failure after
        _MAX_ATTEMPTS syncs. AlreadyExists does not: another agent has the pins. If no other mode works, the
        current one stays. Raises KernelError if the next mode is selected but cannot be opened, and no
        further one works.
        """
        self._failed_first_syncs += 1
        is_permanent = isinstance(failure, ProgramRejected | Unsupported)
        if self._committed or self.config.proxy_mode != AUTO or isinstance(failure, AlreadyExists):
            return
        if self._failed_first_syncs < _MAX_ATTEMPTS and not is_permanent:
            return
        previous = self.serving
        failed = self._failed | {previous.name: Lack(failure.message, failure.hint)}
        try:
            choose(self.config, failed=failed)
        except Unsupported:
            self._committed = True
            return
        previous.close()
        self._exclude(previous.name, failure)
        self.serving = self._prepare_usable()
        self.open()
        self.serving.plan_all(state_now())

    def close(self) -> None:
        """End the cleanup, close the current mode, and release the lock of the network namespace."""
        self._mode_cleanup.close()
        self.serving.close()
        if self._lock:
            self._lock.release()

    def sync(self, verify: bool, retries: int = sys.maxsize) -> SyncResult:
        """Call `ActiveMode.sync`. After the first success, start to remove the objects of other modes.

        With `auto`, a first sync after which the mode forwards nothing counts as failed. Raises KernelError.
        """
        result = self.serving.sync(verify, retries)
        lacking = None if self._committed else self.serving.backend.lacking()
        if lacking and self.config.proxy_mode == AUTO:
            raise lacking
        self._committed = True
        if self._last_result is None:
            self._drain_others()
        self._last_result = result
        return result

    def is_modified_externally(self) -> bool:
        """Return whether another program may have changed the objects of the current mode, or what its
        entries depend on.
        """
        try:
            return self.serving.maintain() or self.serving.reconciler.is_modified_externally()
        except KernelError as failure:  # the sync that reads everything back reports it
            log.warning(CHECK_FAILED, reason=failure.message, hint=failure.hint)
            return True

    def follow(self, config: Config, state_now: Callable[[], ClusterState]) -> bool:
        """Switch to the mode of `config` and apply the complete state, if it is not the current mode.

        Return whether the current mode is in sync afterwards; if not, the caller should sync soon. If the
        switch fails, the current mode continues. Before the first sync no switch is possible, and while the
        node changes it may fail: `config` becomes `pending_config`, and the caller calls again later.
        """
        self.pending_config = None
        try:
            choice = choose(config, failed=self._failed)
        except KernelError as failure:
            log.error(SWITCH_FAILED, reason=failure.message, hint=failure.hint)
            return True
        if choice.mode.name == self.serving.name:
            log.info(SAME_MODE, mode=self.serving.name)
            self.config = dataclasses.replace(self.config, proxy_mode=config.proxy_mode)
            self._report_mode(choice.why_not)
        elif self._last_result is None:
            log.info(SWITCH_LATER, mode=choice.mode.name)
            self.pending_config = config
        else:
            return self._switch(choice, config, state_now)
        return True

    def _switch(self, choice: Choice, config: Config, state_now: Callable[[], ClusterState]) -> bool:
        began = time.monotonic()
        log.info(SWITCHING, mode=self.serving.name, other=choice.mode.name)
        with self._mode_cleanup.pause_for(choice.mode):
            try:
                new, result = self._start_other(choice, config, state_now)
            except KernelError as failure:
                if isinstance(failure, Unsettled) and self._unsettled_switches < _MAX_SWITCHES - 1:
                    self._unsettled_switches += 1
                    log.info(SWITCH_AGAIN, other=choice.mode.name, reason=failure.message)
                    self.pending_config = config
                    self._restore_current(choice.mode)
                    return False
                self._unsettled_switches = 0
                return self._keep_current(choice.mode, failure)
            self._unsettled_switches = 0
            previous, self.serving, self._last_result = self.serving, new, result
            self._failed.pop(new.name, None)
            self.config = config
            self._report_mode(choice.why_not)
            previous.close()
            self._drain_others()
        log.info(SWITCHED, mode=new.name, duration_ms=round(1000 * (time.monotonic() - began), 3))
        return True

    def _start_other(
        self, choice: Choice, config: Config, state_now: Callable[[], ClusterState]
    ) -> tuple[ActiveMode, SyncResult]:
        """Start another mode while the current one continues. Raises KernelError after closing the other."""
        new = self._prepare(choice, config)
        self._lock_namespace(new)
        try:
            if new.backend.binds_sockets:
                self.serving.backend.free_ports()
            result = new.take_over(state_now)
            if self._last_result and result.rejected > self._last_result.rejected:
                raise Rejected(f"cannot use mode {new.name}: the kernel rejects {result.rejected} entries")
        except KernelError:
            new.close()
            raise
        return new, result

    def _lock_namespace(self, mode: ActiveMode) -> None:
        if mode.backend.owns_namespace and self._lock is None:
            self._lock = NamespaceLock(_LOCK_TIMEOUT)

    def _keep_current(self, other: Mode, failure: KernelError) -> bool:
        """Log a failed switch, restore the current mode, and return whether it is in sync."""
        log.error(
            SWITCH_FAILED,
            mode=self.serving.name,
            other=other.name,
            reason=failure.message,
            hint=failure.hint,
        )
        self._metrics.switch_failed(other.name)
        return self._restore_current(other)

    def _restore_current(self, other: Mode) -> bool:
        """Sync the current mode after a failed switch, and return whether it is in sync."""
        try:
            # The other mode may have changed chains that both modes share.
            self._last_result = self.serving.sync(verify=True)
        except KernelError as error:
            log.warning(RESYNC_FAILED, mode=self.serving.name, reason=error.message, hint=error.hint)
            self._last_result = None  # so the next successful sync starts the cleanup of other modes
            return False
        if self._lock:
            self._mode_cleanup.drain([other], self.serving.mode, self.config)
        return True

    def _prepare_usable(self) -> ActiveMode:
        """Prepare the first mode that can be. Raises KernelError if none can be."""
        while True:
            choice = choose(self.config, failed=self._failed)
            try:
                prepared = self._prepare(choice, self.config)
                self._why_not = choice.why_not
                return prepared
            except KernelError as failure:
                self._exclude(choice.mode.name, failure)

    def _report_mode(self, why_not: Mapping[str, Lack]) -> None:
        """Report the current mode, and the more preferred modes, which lack something."""
        self._metrics.mode(self.serving.name)
        self._metrics.fell_back(why_not)
        self._fell_back({name: lack.reason for name, lack in why_not.items()})

    def _exclude(self, name: str, failure: KernelError) -> None:
        """Exclude a mode from `auto` until the next start. Raises `failure` without `auto`.

        Call it in the handler of `failure`.
        """
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
        """Log why preferred modes were not selected, and prepare the selected one. Raises KernelError."""
        for name, lack in choice.why_not.items():
            if (name, lack) not in self._reported:
                self._reported.add((name, lack))
                log.warning(UNAVAILABLE, mode=name, reason=lack.reason, hint=lack.remedy)
        return ActiveMode(choice.mode, config, self._callbacks)

    def _drain_others(self) -> None:
        """If this agent owns the network namespace, start to remove the objects of other modes, and report
        rules of other programs.
        """
        if self._lock is None:
            return
        serving = self.serving.mode
        firewall_report.report(self.config, serving.name)
        others = [mode for mode in MODES if mode.name != serving.name]
        self._mode_cleanup.drain(others, serving, self.config)
