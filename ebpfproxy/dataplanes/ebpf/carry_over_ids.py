"""From the ids of a former layout to the present ones: each layout gives ids of its own.

A former id is taken for the ServicePort that has it in `service_names`, and for an endpoint's place. What
has no such service or endpoint any more gets the id 0, which is in force nowhere: it counts as stale.
"""

from collections.abc import Callable, Mapping
from socket import ntohs

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.entries import ServicePortKey
from ebpfproxy.dataplanes.ebpf.service_record import U32, Place
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.model.address import Address, Family, Protocol

IdsOf = Callable[[ServicePortKey], tuple[int, Mapping[Place, int]] | None]
"""The present ids of a ServicePort and of its endpoints; None where it is not served."""

_FAMILIES = {4: Family.IPV4, 6: Family.IPV6}  # by service_name.family


class Translation:
    """At one moment: what is served may change later. `names`: the former `service_names`."""

    def __init__(self, names: Map, ids_of: IdsOf) -> None:
        self._names = names
        self._ids_of = ids_of
        self._services: dict[int, tuple[int, Mapping[Place, int]]] = {}
        self._known: dict[tuple[int, Address, int], tuple[int, int]] = {}

    def of(self, service: int, address: Address, port: int) -> tuple[int, int]:
        """The ids of service and endpoint, each 0 where there is none. `port` in network order."""
        sought = service, address, port
        found = self._known.get(sought)
        if found is None:
            id_, places = self._service(service)
            found = self._known[sought] = id_, places.get((address, ntohs(port)), 0)
        return found

    def _service(self, former: int) -> tuple[int, Mapping[Place, int]]:
        if former not in self._services:
            key = self._key(former)
            self._services[former] = (self._ids_of(key) if key else None) or (0, {})
        return self._services[former]

    def _key(self, former: int) -> ServicePortKey | None:
        value = self._names.lookup(U32.pack(former))
        if value is None:
            return None
        text, protocol, version = abi.SERVICE_NAME.unpack(value)
        try:
            name = text.rstrip(b"\0").decode()
            return ServicePortKey(name, Protocol(protocol), _FAMILIES[version])
        except (KeyError, ValueError):  # a foreign writer's
            return None
