"""Reads what mode nftables serves, in any process of the node."""

from typing import Any

from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import Key, RelayEntry, RelayKey
from ebpfproxy.backends.userspace import inspection
from ebpfproxy.model.address import is_loopback
from ebpfproxy.model.connection import Connection, Translation


class NftablesInspection(NftablesBackend):
    """The tables in the calling thread's network namespace, and the relay of an agent there."""

    def endpoint_of(self, connection: Connection) -> Translation | None:
        """As conntrack has it; at loopback, as the relay has it."""
        address, _ = connection.frontend
        return inspection.endpoint_of(connection) if is_loopback(address) else super().endpoint_of(connection)

    def shown(self, key: Key, entry: Any) -> Any:
        return inspection.shown(entry) if isinstance(key, RelayKey) else super().shown(key, entry)

    def _relayed(self) -> dict[RelayKey, RelayEntry]:
        return inspection.relayed()
