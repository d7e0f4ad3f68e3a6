"""The entries that a relay holds, and the sockets that belong to them.

Session affinity: the kernel selects the relay by the client's address and by the order in which the relays
bound an address. So the agent sends each change to one relay after the other, always in the same order, and a
client of a ServicePort reaches the same relay at each of its frontends.
"""

import errno
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ebpfproxy.backends.userspace.entries import Balanced, Listen, Listening, NodePorts, Pods, other_port
from ebpfproxy.backends.userspace.messages import Change, Failure, Held
from ebpfproxy.backends.userspace.relay.balancer import Affinity, Balancer
from ebpfproxy.backends.userspace.relay.listening import Listener, other_interfaces
from ebpfproxy.backends.userspace.relay.tcp import Connections, TcpListener
from ebpfproxy.backends.userspace.relay.udp import Flows, UdpListener
from ebpfproxy.backends.userspace.relay.workload import Target, Workload, target
from ebpfproxy.errors import KernelError
from ebpfproxy.model.address import Address, Protocol, is_unspecified, unspecified


class _Frontend:
    """A frontend: one socket at its address, or for a NodePort at each address of the node."""

    def __init__(self, key: Listen, listener: Callable[[Target, Target], Listener] | None) -> None:
        """`listener`: its class with the first argument, None if relays do not have the protocol."""
        self._key = key
        self._listener = listener
        self._sockets: dict[Address, Listener] = {}
        self._failed = False

    def open(self, entry: Listening, service: Balancer, wanted: tuple[Address, ...]) -> Iterable[Failure]:
        """Listen at these addresses according to these entries; yield where that failed."""
        self.entry = entry
        frontend = self._key.frontend
        self._failed = False
        for address in self._sockets.keys() - set(wanted):
            self._sockets.pop(address).close()
        for address in wanted:
            place, shown = target(address, entry.port), target(address, frontend.port)
            if self._listener is None:
                self._failed = True
                yield Failure(self._key, errno.EPROTONOSUPPORT, str(place))
                return
            listener = self._sockets.setdefault(address, self._listener(place, shown))
            try:
                listener.open(entry, service)
            except (OSError, KernelError) as failure:
                self._failed = True
                cause = failure if isinstance(failure, OSError) else failure.__cause__
                yield Failure(self._key, getattr(cause, "errno", None) or errno.EINVAL, str(place))

    def is_open(self) -> bool:
        """Return whether every socket is open."""
        return not self._failed and all(each.is_open() for each in self._sockets.values())

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()


class Entries:
    """All entries of a relay."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self._affinity = Affinity(work.start.settings.affinity_clients)
        self.connections, self.flows = Connections(work), Flows(work)
        self._listeners: Mapping[Protocol, Callable[[Target, Target], Listener]] = {
            Protocol.TCP: partial(TcpListener, self.connections),
            Protocol.UDP: partial(UdpListener, self.flows),
        }
        self._node_ports: dict[NodePorts, tuple[Address, ...]] = {}
        self._services: dict[Balanced, Balancer] = {}
        self._frontends: dict[Listen, _Frontend] = {}
        self._of_service: dict[Balanced, set[Listen]] = {}
        self._present: Mapping[Listen, Listening] = {}  # after the current change
        self._devices: dict[Pods, list[int]] = {}

    def apply(self, change: Change) -> list[Failure]:
        """Put and drop entries; return where a relay does not listen."""
        put = change.put
        touched: dict[Listen, Listening] = {}
        if put.node_ports:
            self._node_ports.update(put.node_ports)
            touched.update((key, each.entry) for key, each in self._frontends.items() if _is_node_port(key))
        for service, balancing in put.services:
            known = self._services.get(service)
            if known:
                known.put(balancing)
            else:
                first = self.work.start.number + zlib.crc32(str(service).encode())
                self._services[service] = Balancer(balancing, self._affinity, first)
            of_service = self._of_service.get(service, ())
            touched.update((key, self._frontends[key].entry) for key in of_service)
        touched.update(put.listeners)
        for key in change.drop_listeners:
            self._drop(key)
        for key in (*touched, *change.drop_listeners):  # see `_addresses`
            for port in {key.frontend.port, other_port(key.frontend.port)}:
                node_port = _at(key, unspecified(key.family), port)
                if node_port in self._frontends:
                    touched.setdefault(node_port, self._frontends[node_port].entry)
        for key in change.drop_listeners:
            touched.pop(key, None)
        self._present = {key: each.entry for key, each in self._frontends.items()} | touched
        failures = [failure for key, entry in touched.items() for failure in self._open(key, entry)]
        for service in change.drop_services:
            for key in self._of_service.pop(service, set()).copy():
                self._drop(key)
            self._services.pop(service, None)
        return failures

    def devices_changed(self) -> None:
        """Renew the filters that contain devices, if others than those of pods have changed."""
        by_device = [
            (key, each.entry) for key, each in self._frontends.items() if _contains_devices(each.entry)
        ]
        found = {pods: other_interfaces(pods) for _, entry in by_device if (pods := entry.pods)}
        if found != self._devices:
            self._devices = found
            for key, entry in by_device:
                self._open(key, entry)  # a listener that fails is missing in `held`

    def held(self) -> Held:
        """Return the entries, except those of listeners that do not listen."""
        return Held(
            list(self._node_ports.items()),
            [(key, each.entry) for key, each in self._services.items()],
            [(key, each.entry) for key, each in self._frontends.items() if each.is_open()],
        )

    def _open(self, key: Listen, entry: Listening) -> Iterable[Failure]:
        service = self._services.get(entry.service)
        if service is None:  # it was dropped in the same change as the frontend moved to another one
            return [Failure(key, errno.ENOENT, str(key.frontend))]
        frontend = self._frontends.get(key)
        if frontend is None:
            frontend = self._frontends[key] = _Frontend(key, self._listeners.get(key.frontend.protocol))
        else:
            self._of_service.get(frontend.entry.service, set()).discard(key)
        self._of_service.setdefault(entry.service, set()).add(key)
        return list(frontend.open(entry, service, self._addresses(key)))

    def _addresses(self, key: Listen) -> tuple[Address, ...]:
        """Return where a frontend listens. A NodePort does not listen at the address and port of another
        frontend, nor where that listens: it comes first.
        """
        if not _is_node_port(key):
            return (key.frontend.address,)
        addresses = self._node_ports.get(NodePorts(key.family), ())
        return tuple(each for each in addresses if not self._is_taken(key, each))

    def _is_taken(self, key: Listen, address: Address) -> bool:
        port = key.frontend.port
        other = self._present.get(_at(key, address, other_port(port)))
        return _at(key, address, port) in self._present or (other is not None and other.port == port)

    def _drop(self, key: Listen) -> None:
        frontend = self._frontends.pop(key, None)
        if frontend:
            frontend.close()
            self._of_service.get(frontend.entry.service, set()).discard(key)


def _contains_devices(entry: Listening) -> bool:
    return entry.pods is not None and not entry.pods.network


def _is_node_port(key: Listen) -> bool:
    return is_unspecified(key.frontend.address)


def _at(key: Listen, address: Address, port: int) -> Listen:
    return Listen(key.family, key.frontend._replace(address=address, port=port))
