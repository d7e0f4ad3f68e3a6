"""Network namespaces of this machine: the facts that show whose they are and how their packets travel."""

import enum
from typing import NamedTuple

from ebpfproxy.model.address import Address


class Link(enum.Enum):
    """Where the counterparts of a namespace's devices are: peers of pairs, and parents of macvlan or ipvlan.

    ELSEWHERE also if only some of them are.
    """

    NONE = "none"
    NODE = "node"
    ELSEWHERE = "elsewhere"


class Namespace(NamedTuple):
    """A network namespace other than the node's.

    - `cookie`: identifies it until the next boot.
    - `link`: where the counterparts of its devices are.
    - `outer`: the ifindexes of the node's devices that are peers of its devices.
    - `addresses`: those of global scope.
    - `pod`: the UID of the pod whose kubelet cgroup has its processes, "" if there is none. Processes that a
      container of a pod has started in a namespace of its own do not count.
    - `up`: the names of its devices that are up, without loopback.
    - `special`: why packets to a frontend may take another way than those to an endpoint, as far as rules and
      routes of the namespace are concerned. A phrase for each reason.
    - `in_flight`: it may have connections that the packet path translates at its device.
    """

    cookie: int
    link: Link = Link.NONE
    outer: frozenset[int] = frozenset()
    addresses: frozenset[Address] = frozenset()
    pod: str = ""
    up: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    in_flight: bool = True


class NamespaceClass(enum.Enum):
    """Whose namespace it is, and by which path its sockets reach Services."""

    NODE = "node"
    SOCKET_PATH = "pod, socket path"
    PACKET_PATH = "pod, packet path"
    OTHER = "other, packet path"
