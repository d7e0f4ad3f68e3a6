"""Who connects: a pod of this node, the node itself, or a client outside, and how the plan classifies it."""

from typing import NamedTuple

from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import ClientClass
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.model.address import Address, Family, contains, family, format_address
from ebpfproxy.model.namespace import Namespace, NamespaceClass
from ebpfproxy.plan import namespaces
from ebpfproxy.plan.service_plan import DetectLocal, DeviceRole, LocalTraffic

EBPF = "ebpf"


class Origin(NamedTuple):
    """A client.

    - `kind`: where it is.
    - `addresses`: its own, at most one of each family is used. Empty: unknown, for example any pod.
    - `interface`: the node's device that leads to a pod, "" if unknown; `ifindex` is 0 then.
    - `cookie`: of the pod's network namespace, 0 if unknown.
    - `bypasses_hooks`: the node does not see its sockets.
    - `port`: of its connection, 0 if unknown.
    """

    kind: ClientClass
    name: str
    addresses: tuple[Address, ...] = ()
    interface: str = ""
    ifindex: int = 0
    cookie: int = 0
    bypasses_hooks: bool = False
    port: int = 0

    def address(self, ip_family: Family) -> Address | None:
        """Its first address of a family, None if it is unknown."""
        return next((each for each in self.addresses if family(each) is ip_family), None)

    def __str__(self) -> str:
        known = ", ".join(map(format_address, self.addresses))
        return self.name + (f" ({known})" if known and known != self.name else "")


ANY_POD = Origin(ClientClass.POD, "a pod of this node")
THE_NODE = Origin(ClientClass.NODE, "this node")
ANYONE_OUTSIDE = Origin(ClientClass.OUTSIDE, "a client outside")


class Classified(NamedTuple):
    """The class of a client in a plan, and why."""

    client: ClientClass
    why: Reason


def namespace_class(origin: Origin, situation: Situation) -> tuple[NamespaceClass, str] | None:
    """Return the class of a pod's or guest's network namespace in mode ebpf, and the reason. None if the
    namespace is unknown, as that of any pod, or without this machine's kernel."""
    if origin.kind is not ClientClass.POD or not (origin.cookie or origin.ifindex):
        return None
    if found := _namespace(origin, situation):
        return namespaces.classify(found, situation.state)
    if not origin.cookie:
        return None
    return NamespaceClass.OTHER, "no device leads to this node, and it has no process of a pod"


def _namespace(origin: Origin, situation: Situation) -> Namespace | None:
    for each in situation.state.namespaces:
        if each.cookie == origin.cookie or (not origin.cookie and origin.ifindex in each.outer):
            return each
    return None


def is_by_namespace(origin: Origin, situation: Situation, ip_family: Family) -> bool:
    """Return whether the network namespace identifies the client of a socket to session affinity and hashes.

    Otherwise its address does, also that of a pod whose namespace is unknown.
    """
    if origin.kind is ClientClass.NODE:
        return True
    found = _namespace(origin, situation)
    return found is not None and namespaces.source(found, ip_family) is None


def address_of(origin: Origin, situation: Situation, ip_family: Family) -> Address | None:
    """Return the source of its packets to Services. None if it is unknown."""
    found = origin.address(ip_family)
    known = None if found else _namespace(origin, situation)
    return namespaces.source(known, ip_family) if known else found


def classify(origin: Origin, situation: Situation, ip_family: Family) -> Classified:
    """Return the class of the client as the mode recognizes it (plan/local_traffic.py).

    A pod without a known address or interface is taken for one that is recognized.
    """
    if origin.kind is ClientClass.NODE:
        return Classified(ClientClass.NODE, Reason.IS_NODE)
    if situation.context.detect_local is DetectLocal.DEVICES:
        if origin.kind is ClientClass.POD and not _is_guest(origin, situation):
            return Classified(ClientClass.POD, Reason.POD_BY_DEVICE)
        return Classified(ClientClass.OUTSIDE, Reason.IS_OUTSIDE)
    traffic = situation.node.local_traffic.get(ip_family)
    if traffic is None:
        return Classified(ClientClass.OUTSIDE, Reason.NO_DETECTION)
    by = Reason.POD_BY_NETWORK if traffic.network else Reason.POD_BY_INTERFACE
    if _is_detected(origin, traffic, ip_family):
        return Classified(ClientClass.POD, by)
    is_pod = origin.kind is ClientClass.POD
    return Classified(ClientClass.OUTSIDE, Reason.NOT_DETECTED_AS_POD if is_pod else Reason.IS_OUTSIDE)


def _is_guest(origin: Origin, situation: Situation) -> bool:
    """Return whether the device, or a port of the bridge, that leads to the client is a guest's."""
    guests = {each.ifindex for each in situation.node.devices if each.role is DeviceRole.GUEST}
    guests |= {each.master for each in situation.state.devices if each.ifindex in guests}
    return origin.ifindex in guests


def _is_detected(origin: Origin, traffic: LocalTraffic, ip_family: Family) -> bool:
    is_pod = origin.kind is ClientClass.POD
    if traffic.network:
        address = origin.address(ip_family)
        return contains(traffic.network, address) if address else is_pod
    if not origin.interface:
        return is_pod
    if traffic.prefix:
        return origin.interface.startswith(traffic.interface)
    return origin.interface == traffic.interface
