"""The relay process that serves NodePorts on 127.0.0.1 and ::1. It runs only while there are any."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ebpfproxy.backends.nftables.entries import RelayEntry, RelayKey
from ebpfproxy.backends.userspace.entries import Listen, UserspaceSettings
from ebpfproxy.backends.userspace.relays import Relays, rejection
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.model.address import Family


class LocalhostRelay:
    """One relay, and the entries that it holds. Any thread may read `listeners` and `failures`."""

    def __init__(self, settings: UserspaceSettings, changed: Callable[[], object]) -> None:
        """`changed` is called when the relay was replaced, because it had ended."""
        self._relays = Relays(settings, changed)
        self._runs = False
        self._entries: dict[RelayKey, RelayEntry] = {}
        self.listeners: Mapping[Family, int] = {}
        """How many NodePorts have a listener. It is replaced as a unit."""
        self.failures: Mapping[Family, int] = {}
        """How many attempts to listen have failed. It is replaced as a unit."""

    @property
    def replaced(self) -> int:
        """How many times the relay was replaced."""
        return self._relays.replaced

    def read(self) -> dict[RelayKey, RelayEntry]:
        """Return the entries in force. Empty if no relay runs, or while it is being replaced."""
        try:
            return self._relays.read() if self._runs else {}
        except Rejected:
            return {}

    def is_in_sync(self) -> bool:
        """Return whether the relay holds what was put. Another program may have destroyed a socket."""
        return self.read() == self._entries

    def apply(
        self, puts: Mapping[RelayKey, RelayEntry], drops: Collection[RelayKey]
    ) -> dict[RelayKey, KernelError]:
        """Put and drop entries; return the listeners that do not listen, which it does not hold then.

        Start the relay before the first entry, and end it after the last one. If it cannot be started, all
        are rejected.
        """
        if puts and not self._runs:
            try:
                self._relays.open()
            except KernelError as failure:
                return dict.fromkeys(puts, failure)
            self._runs = True
        if not self._runs:
            return {}
        failures = self._relays.apply(puts, drops)
        if failures:
            self._relays.apply({}, failures)
        self._entries |= {key: entry for key, entry in puts.items() if key not in failures}
        for key in (*drops, *failures):
            self._entries.pop(key, None)
        if not self._entries:
            self.close()
        self.listeners = Counter(key.family for key in self._entries if isinstance(key, Listen))
        self.failures = Counter(self.failures) + Counter(key.family for key in failures)
        return {key: rejection(failure) for key, failure in failures.items()}

    def close(self) -> None:
        """End the relay with its connections. Does nothing if it does not run."""
        self._runs, self._entries = False, {}
        self._relays.close()
