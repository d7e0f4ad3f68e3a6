"""The network namespaces of endpoints on this node that get untranslated packets: finding and changing them.

`endpoint_devices` has what is in one of them.

An address that a connected TCP socket uses stays until the connection ends, as a real server without new
connections does (`servers`). It then lingers: it is not read as an entry, and `release` removes it.
"""

import contextlib
from collections.abc import Collection, Generator, Iterable

from ebpfproxy.backends.ipvs import endpoint_devices
from ebpfproxy.backends.ipvs.endpoint_devices import Namespace, Rejections
from ebpfproxy.backends.ipvs.entries import EndpointKey
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family, format_address

log = Logger(__name__)

NO_NAMESPACE = "No network namespace has the address of an endpoint on this node"
"""The endpoint gets no packets with direct routing or a tunnel. Its pod is ending, or its address is not on a
device of its own; or the agent may not see it, which requires hostPID and CAP_SYS_PTRACE."""


class EndpointNetworks:
    """Reads and changes the network namespaces of endpoints of this node."""

    def __init__(self) -> None:
        self._wanted: set[EndpointKey] = set()  # put, or read: a previous run may have put them
        self._lingering: set[EndpointKey] = set()
        self._paths: dict[Address, str] = {}
        self._missing: set[Address] = set()  # reported endpoints
        self._is_empty = False  # whether no namespace has a device of the agent

    @property
    def endpoints(self) -> frozenset[Address]:
        """The endpoints that need something."""
        return frozenset(key.endpoint for key in self._wanted)

    def read(self, families: Collection[Family]) -> dict[EndpointKey, bool]:
        """Return the entries. Those of an endpoint that has no namespace count as they should be: there is
        nothing that could differ.
        """
        if self._is_empty and not self._wanted and not self._lingering:
            return {}
        self.release()
        entries: dict[EndpointKey, bool] = {}
        present: set[Address] = set()
        self._is_empty = True
        for path in namespaces.network_namespaces():
            with endpoint_devices.entered(path) as found:
                if found is None:
                    self._is_empty = False  # it may have a device
                    continue
                self._is_empty = self._is_empty and not found.owned
                present |= found.own.keys()
                self._paths.update(dict.fromkeys(found.own.keys() & self.endpoints, path))
                entries.update(
                    (key, entry) for key, entry in endpoint_devices.entries(found) if key.family in families
                )
        for key in self._lingering:
            entries.pop(key, None)
        self._wanted |= entries.keys()
        self._report_missing(self.endpoints - present)
        return entries | {key: True for key in self._wanted if key.endpoint not in present}

    def put(self, keys: Iterable[EndpointKey]) -> Rejections:
        keys = set(keys)
        self._wanted |= keys
        self._lingering -= keys
        rejected: Rejections = {}
        by_endpoint = _by_endpoint(keys)
        # An exception would leave the generator, and so this thread, in the namespace of an endpoint.
        with contextlib.closing(self._visit(by_endpoint.copy())) as visits:
            for endpoint, found in visits:
                rejected |= endpoint_devices.put(endpoint, by_endpoint.pop(endpoint), found)
        self._is_empty = False
        self._report_missing(self._missing | by_endpoint.keys())
        return rejected

    def drop(self, keys: Iterable[EndpointKey]) -> Rejections:
        keys = set(keys)
        self._wanted -= keys
        return self._drop(keys)

    def release(self) -> None:
        """Remove the addresses that only connections kept which have ended since. What the kernel refuses to
        remove is retried at the next call.
        """
        if self._lingering:
            self._lingering |= self._drop(self._lingering.copy()).keys()

    def _drop(self, keys: set[EndpointKey]) -> Rejections:
        rejected: Rejections = {}
        self._lingering -= keys
        by_endpoint = _by_endpoint(keys)
        with contextlib.closing(self._visit(by_endpoint)) as visits:
            for endpoint, found in visits:
                leaving = by_endpoint[endpoint]
                try:
                    self._lingering |= endpoint_devices.drop(endpoint, leaving, found)
                except KernelError as failure:
                    rejected.update(dict.fromkeys(leaving, failure))
        return rejected

    def _visit(self, endpoints: Collection[Address]) -> Generator[tuple[Address, Namespace]]:
        """Yield each endpoint with its namespace, which the calling thread has entered meanwhile. Endpoints
        without a namespace are left out.
        """
        left = set(endpoints)
        for endpoint in sorted(left):
            if path := self._paths.get(endpoint):
                with endpoint_devices.entered(path) as found:
                    if found and endpoint in found.own:
                        left.discard(endpoint)
                        yield endpoint, found
                        continue
                self._paths.pop(endpoint, None)
        for path in namespaces.network_namespaces() if left else ():
            with endpoint_devices.entered(path) as found:
                for endpoint in sorted(left.intersection(found.own)) if found else ():
                    left.discard(endpoint)
                    self._paths[endpoint] = path
                    assert found
                    yield endpoint, found
            if not left:
                return

    def _report_missing(self, endpoints: Collection[Address]) -> None:
        for endpoint in sorted(set(endpoints) - self._missing):
            log.warning(
                NO_NAMESPACE,
                endpoint=format_address(endpoint),
                hint="run the agent with hostPID and CAP_SYS_PTRACE, or set --ipvs-forwarding=nat",
            )
        self._missing = set(endpoints)


def leftovers() -> list[str]:
    """Return the paths of the network namespaces that have devices of the agent. Raises KernelError."""
    paths = []
    for path in namespaces.network_namespaces():
        with endpoint_devices.entered(path) as found:
            if found and (found.owned or found.unfinished):
                paths.append(path)
    return paths


def remove(path: str, only_unused: bool = False) -> set[Address]:
    """Remove the agent's devices from a network namespace, and restore its sysctls. Raises KernelError.

    With `only_unused`, nothing is removed while connected TCP sockets use addresses of these devices. Return
    those addresses.
    """
    with endpoint_devices.entered(path) as found:
        used = endpoint_devices.used_addresses(found) if found and only_unused else set()
        for device in (*found.owned, *found.unfinished) if found and not used else ():
            endpoint_devices.delete(device)
        return used


def _by_endpoint(keys: Iterable[EndpointKey]) -> dict[Address, set[EndpointKey]]:
    found: dict[Address, set[EndpointKey]] = {}
    for key in keys:
        found.setdefault(key.endpoint, set()).add(key)
    return found
