"""Parse the host ports of a pod, and the annotations of pods and Namespaces about the socket path."""

from collections.abc import Iterator

from ebpfproxy.api import fields, parts
from ebpfproxy.api.event import NamespaceChanged, PodChanged
from ebpfproxy.api.parts import Complaints, shorten, usable_name
from ebpfproxy.model.address import Address, Family, family, parse_address
from ebpfproxy.model.pod import HostPort, Pod

_ENDED = frozenset({"Succeeded", "Failed"})


def pod_changed(decoded: fields.Pod) -> PodChanged:
    """Return the pod with its host ports, from its first address to its end, ready or not.

    The plugin portmap does the same: it acts when the network of the pod is set up. A container of a pod with
    hostNetwork listens on the port itself. Raises InvalidObject if the name is not usable.
    """
    name, complaints = usable_name(decoded.metadata), Complaints()
    status = decoded.status or fields.PodStatus()
    if decoded.spec.host_network or status.phase in _ENDED:
        return PodChanged(name, None)
    addresses = _addresses(status, complaints)
    ports = tuple(dict.fromkeys(_host_ports(decoded.spec, complaints)))
    annotations = decoded.metadata.annotations
    # The cgroup of a static pod has the hash of its manifest (Kubernetes, pkg/kubelet/config/common.go).
    uid = (annotations and annotations.config_hash) or decoded.metadata.uid or ""
    socket_lb = _socket_lb(annotations, complaints)
    pod = Pod(name, addresses, ports if addresses else (), socket_lb, uid)
    return PodChanged(name, pod, complaints.reported())


def namespace_changed(decoded: fields.Namespace) -> NamespaceChanged:
    """Return the annotation of a Namespace. Raises InvalidObject if the name is not usable."""
    name, complaints = usable_name(decoded.metadata), Complaints()
    socket_lb = _socket_lb(decoded.metadata.annotations, complaints)
    return NamespaceChanged(name.name, socket_lb, complaints.reported())


def _socket_lb(annotations: fields.Annotations | None, complaints: Complaints) -> bool | None:
    text = annotations.socket_lb if annotations else None
    if text not in (None, "on", "off"):
        complaints.append(f"annotation {fields.SOCKET_LB}: {shorten(repr(text))} is neither on nor off")
    return {"on": True, "off": False}.get(text or "")


def _addresses(status: fields.PodStatus, complaints: Complaints) -> tuple[Address, ...]:
    texts = [each.ip for each in status.pod_ips or () if each] or [status.pod_ip]
    found: dict[Family, Address] = {}
    for address in parts.addresses(texts, "status.podIPs", complaints):
        found.setdefault(family(address), address)
    return tuple(found.values())


def _host_ports(spec: fields.PodSpec, complaints: Complaints) -> Iterator[HostPort]:
    for container in (*(spec.init_containers or ()), *(spec.containers or ())):
        for port in (container.ports if container else None) or ():
            if port and port.host_port:
                served = _host_port(port, complaints)
                if served:
                    yield served


def _host_port(port: fields.ContainerPort, complaints: Complaints) -> HostPort | None:
    protocol = parts.PROTOCOLS.get(port.protocol)
    host_port = parts.node_port(port.host_port, "hostPort", complaints)
    container_port = parts.node_port(port.container_port, "containerPort", complaints)
    if protocol is None:
        complaints.append(f"hostPort: protocol {shorten(repr(port.protocol))} is unknown")
        return None
    if not host_port or not container_port:
        return None
    if not port.host_ip:
        return HostPort(None, host_port, protocol, container_port)
    try:
        return HostPort(parse_address(port.host_ip), host_port, protocol, container_port)
    except ValueError:
        complaints.append(f"hostPort: hostIP {shorten(repr(port.host_ip))} is not an IP address")
        return None
