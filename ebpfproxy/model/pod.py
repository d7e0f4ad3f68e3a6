"""Pod (core/v1): its host ports, and its annotation about the socket path."""

import dataclasses
from typing import NamedTuple

from ebpfproxy.model.address import Address, Protocol
from ebpfproxy.model.service import NamespacedName


class HostPort(NamedTuple):
    """One element of spec.containers[].ports with a hostPort.

    `host_address` is None without hostIP: then every address of the node that accepts NodePorts has the port,
    in both families. An unspecified address means the same in one family.
    """

    host_address: Address | None
    host_port: int
    protocol: Protocol
    container_port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """A pod that runs or starts, and does not share the network namespace of its node.

    - `addresses`: at most one of each family; empty if it has none yet.
    - `host_ports`: in the order of the API, without duplicates; empty without addresses.
    - `socket_lb`: its annotation: whether the socket path may serve its sockets, in mode ebpf. None: as its
      Namespace says.
    - `uid`: as in the name of its cgroup.
    """

    name: NamespacedName
    addresses: tuple[Address, ...]
    host_ports: tuple[HostPort, ...]
    socket_lb: bool | None = None
    uid: str = ""
