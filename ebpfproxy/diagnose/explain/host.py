"""What this machine knows: routes, and the client that an address, process or namespace is."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.backends.selection import AUTO
from ebpfproxy.config import Config
from ebpfproxy.diagnose.explain.origin import ANY_POD, ANYONE_OUTSIDE, THE_NODE, Origin
from ebpfproxy.diagnose.explain.result import ClientClass
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.errors import ConfigError, KernelError, NotFound, Rejected
from ebpfproxy.linux.netlink import links, pod_devices, routing
from ebpfproxy.linux.netns import namespaces, netns
from ebpfproxy.model.address import Address, contains, family, format_address, parse_address
from ebpfproxy.model.device import Device
from ebpfproxy.model.endpoint import Endpoint
from ebpfproxy.plan.devices import roles
from ebpfproxy.plan.service_plan import DeviceRole

OFFLINE_MODE = "ebpf"
"""The mode without a machine: the one that `auto` prefers."""

_WORDS = {"node": THE_NODE, "pod": ANY_POD, "outside": ANYONE_OUTSIDE}
_HINT = "give an address, a process id, a network namespace, node, pod or outside"
_WITH_PORT = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):([0-9]{1,5})")
_OWN = "/proc/thread-self/ns/net"


def route_to(address: Address) -> routing.Route | None:
    """The route in the calling thread's network namespace. None if it cannot be read."""
    try:
        return routing.route_to(address)
    except KernelError:
        return None


def mode_without_kernel(config: Config) -> str:
    """Return the mode that --proxy-mode names, else the one that `auto` prefers."""
    return config.proxy_mode if config.proxy_mode != AUTO else OFFLINE_MODE


def origin_of(text: str, situation: Situation, live: bool) -> Origin:
    """Return the client that `text` names: node, pod, outside, an address, a process id, or a namespace.

    An address may have a port. `live`: whether the situation is that of this machine. Without it, processes
    and namespaces are unknown. Raises ConfigError or KernelError.
    """
    if text in _WORDS:
        return _with_own_cookie(_WORDS[text]) if live and text == "node" else _WORDS[text]
    if given := _address_and_port(text):
        address, port = given
        origin = _of_address(address, situation)._replace(port=port)
        is_pod = origin.kind is ClientClass.POD
        return origin._replace(cookie=_cookie_of_pod(address)) if live and is_pod else origin
    if not live:
        raise ConfigError(f"--from: {text!r} is not known without this machine's kernel", _HINT)
    return _of_namespace(_namespace(text), text, situation)


def _address_and_port(text: str) -> tuple[Address, int] | None:
    """Parse an address, or an address with a port. The port is 0 if none is given; None for other texts.

    >>> parsed = [_address_and_port(text) for text in ("10.0.0.1", "10.0.0.1:99", "[::1]:99", "::1", "web")]
    >>> [each and (format_address(each[0]), each[1]) for each in parsed]
    [('10.0.0.1', 0), ('10.0.0.1', 99), ('::1', 99), ('::1', 0), None]
    """
    found = _WITH_PORT.fullmatch(text)
    host, port = (found[1] or found[2], int(found[3])) if found else (text, 0)
    try:
        return (parse_address(host), port) if port < 1 << 16 else None
    except ValueError:
        return None


def pods_here(situation: Situation) -> Iterator[tuple[Path, Origin]]:
    """Yield the network namespaces of pods of this node, and the pods as clients.

    Pods of other nodes on this machine, pods whose sockets bypass the hooks, and namespaces that cannot be
    entered are left out.
    """
    for path in map(Path, namespaces.network_namespaces()):
        try:
            found = _of_namespace(path, str(path), situation)
        except (KernelError, OSError):  # the process may have ended
            continue
        if found.interface and not found.bypasses_hooks:
            yield path, found


def _with_own_cookie(origin: Origin) -> Origin:
    try:
        return origin._replace(cookie=netns.cookie())
    except KernelError:
        return origin


def _of_address(address: Address, situation: Situation) -> Origin:
    text = format_address(address)
    if situation.is_local(address):
        return Origin(ClientClass.NODE, text, (address,))
    route = situation.routes(address)
    device = situation.device(route.ifindex) if route else None
    is_pod_device = device is not None and _leads_to_pods(device, situation)
    is_neighbor = route is not None and is_pod_device and not route.has_gateway
    if not is_neighbor and not _is_pod_here(address, situation):
        return Origin(ClientClass.OUTSIDE, text, (address,))
    if device is None or not is_pod_device:
        return Origin(ClientClass.POD, text, (address,))
    is_guest = device.kind == "tun" or device.ifindex in situation.state.bypassing
    return Origin(ClientClass.POD, text, (address,), device.name, device.ifindex, bypasses_hooks=is_guest)


def _cookie_of_pod(address: Address) -> int:
    """Return the cookie of this node's pod with the address; 0 if it is not found or unreadable."""
    with (
        contextlib.suppress(KernelError, OSError),
        Path(_OWN).open("rb") as own,
        contextlib.closing(namespaces.opened_network_namespaces()) as found,
    ):
        for descriptor in found:
            with namespaces.in_namespace(descriptor):
                has_address = any(address in each.addresses for each in links.read())
                if has_address and pod_devices.are_linked_to(own.fileno()):
                    return netns.cookie()
    return 0


def _leads_to_pods(device: Device, situation: Situation) -> bool:
    """Whether it is the device of a pod or guest, or a bridge of such devices."""
    role = roles(situation.state.devices, situation.state.node)[device.ifindex]
    return role is DeviceRole.POD or (role is None and device.kind == "bridge")


def _is_pod_here(address: Address, situation: Situation) -> bool:
    """Whether the address is an endpoint on this node, or in the Node's podCIDRs."""
    node = situation.state.node
    if node and any(contains(net, address) for net in node.pod_cidrs):
        return True
    return any(
        endpoint.address == address and endpoint.node == situation.context.node_name
        for endpoint in _endpoints(situation)
    )


def _endpoints(situation: Situation) -> Iterator[Endpoint]:
    for pieces in situation.state.slices.values():
        for piece in pieces:
            yield from piece.endpoints


def _namespace(text: str) -> Path:
    """Return the path of the namespace of a process id, of a name below /run/netns, or the path itself."""
    if text.isascii() and text.isdigit():
        path = Path(f"/proc/{text}/ns/net")
        if not path.exists():
            raise NotFound(f"--from: no process {text}", _HINT)
        return path
    candidates = [Path(text)] if "/" in text else [Path(folder, text) for folder in namespaces.RUN_NETNS]
    for path in candidates:
        if path.exists():
            return path
    raise ConfigError(f"--from: {text!r} is not known", _HINT)


def _of_namespace(path: Path, text: str, situation: Situation) -> Origin:
    own = namespaces.identity_of(_OWN)
    identity = namespaces.identity_of(str(path))
    if identity is None:
        raise Rejected(f"cannot read {path}", "run as root, in the process id namespace of the node")
    name = f"process {text}" if text.isdigit() else f"network namespace {text}"
    if identity == own:
        return _with_own_cookie(THE_NODE._replace(name=f"{name}, of this node"))
    with Path(_OWN).open("rb") as node, path.open("rb") as pod, namespaces.in_namespace(pod.fileno()):
        found = [address for each in links.read() for address in each.addresses]
        is_of_node = pod_devices.are_linked_to(node.fileno())
        cookie = netns.cookie()
    addresses = tuple({family(address): address for address in reversed(found)}.values())
    origin = Origin(ClientClass.POD, name, addresses, cookie=cookie)
    for address in addresses if is_of_node else ():
        seen = _of_address(address, situation)
        if seen.interface:
            return origin._replace(
                interface=seen.interface, ifindex=seen.ifindex, bypasses_hooks=seen.bypasses_hooks
            )
    return origin
