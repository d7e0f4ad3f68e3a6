"""Changes of maps, programs and attachments of mode ebpf.

Each function makes one change at random and returns a part of the line that must name it. `STAY` are left
until the node is restored; the others are context managers, since their programs end with the block.
"""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.attachments import SIDES
from ebpfproxy.backends.ebpf.features import RETURN_1
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.linux.bpf import bpf, cgroup, tc, tcx
from ebpfproxy.linux.bpf.bpf import Link, Map, Program
from ebpfproxy.linux.netlink import links
from ebpfproxy.model.address import format_address, parse_address
from tests.kernel import others
from tests.kernel.verify.node import Node
from tests.support.service_maps import read_slot, write_slot

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


@contextlib.contextmanager
def opened(node: Node, name: str) -> Iterator[Map]:
    pin = (node.config.bpffs_root / "current").resolve() / "maps" / name
    with contextlib.closing(Map.pinned(pin)) as found:
        yield found


def _any(node: Node, map_: Map) -> tuple[bytes, bytes]:
    return node.random.choice(sorted(map_.items()))


def _name(node: Node, service: int) -> str:
    with contextlib.closing(View(node.config.bpffs_root)) as view:
        return view.name(service)


def delete_frontend(node: Node) -> str:
    with opened(node, "services") as services:
        key, value = _any(node, services)
        services.delete(key)
    return _name(node, abi.SERVICE.unpack(value)[2])


def change_frontend(node: Node) -> str:
    """Change flags, session affinity or the kind."""
    with opened(node, "services") as services:
        key, value = _any(node, services)
        *ranges, service, affinity, flags, kind, algorithm, slow_start = abi.SERVICE.unpack(value)
        flags, affinity, kind = node.random.choice(
            [
                (flags ^ abi.SERVICE_REJECT, affinity, kind),
                (flags ^ abi.SERVICE_MASQUERADE_OUTSIDE, affinity, kind),
                (flags, affinity + 1, kind),
                (flags, affinity, kind + 1),
            ]
        )
        services.update(key, abi.SERVICE.pack(*ranges, service, affinity, flags, kind, algorithm, slow_start))
    return _name(node, service)


def add_frontend(node: Node) -> str:
    with opened(node, "services") as services:
        _, value = _any(node, services)
        port = socket.htons(node.random.randrange(1, 65536))
        key = abi.SERVICE_KEY.pack(parse_address("10.111.0.1"), port, socket.IPPROTO_TCP, 0)
        services.update(key, value)
    return _name(node, abi.SERVICE.unpack(value)[2])


def move_frontend(node: Node) -> str:
    """Give a frontend the value of another Service."""
    with opened(node, "services") as services:
        of: dict[int, tuple[bytes, bytes]] = {}
        for key, value in sorted(services.items()):
            of.setdefault(abi.SERVICE.unpack(value)[2], (key, value))
        one, other = node.random.sample(sorted(of), 2)
        services.update(of[one][0], of[other][1])
    return _name(node, one)


def _slots(node: Node) -> tuple[int, int, int]:
    """The first slot, the number of slots, and the id of a Service with endpoints."""
    with opened(node, "services") as services:
        found = [abi.SERVICE.unpack(value) for _, value in sorted(services.items())]
    ranges = [(*abi.SLOT_RANGE.unpack(each[0]), each[2]) for each in found]
    return node.random.choice([each for each in ranges if each[1]])


def change_slot(node: Node) -> str:
    first, count, service = _slots(node)
    with opened(node, "slots") as slots:
        slot = first + node.random.randrange(count)
        write_slot(slots, slot, read_slot(slots, slot) + node.random.choice([1, 2, 1000]))
    return _name(node, service)


def change_endpoint(node: Node) -> str:
    first, count, service = _slots(node)
    with opened(node, "slots") as slots, opened(node, "endpoints") as endpoints:
        key = _U32.pack(read_slot(slots, first + node.random.randrange(count)))
        address, port, flags, of = abi.ENDPOINT.unpack(endpoints.lookup(key) or b"")
        address, port, flags = node.random.choice(
            [
                (parse_address("10.244.99.1"), port, flags),
                (address, port ^ 1, flags),
                (address, port, 0),
                (address, port, flags ^ abi.ENDPOINT_LOCAL),
                (address, port, flags ^ abi.ENDPOINT_ON_NODE),
            ]
        )
        endpoints.update(key, abi.ENDPOINT.pack(address, port, flags, of))
    return _name(node, service)


def add_endpoint(node: Node) -> str:
    """Add an endpoint that no Service has."""
    with opened(node, "endpoints") as endpoints:
        number = endpoints.shape.max_entries - 1 - node.random.randrange(100)
        flags = abi.ENDPOINT_LISTED | abi.ENDPOINT_CLUSTER
        value = abi.ENDPOINT.pack(parse_address("10.244.99.9"), socket.htons(8080), flags, 999_999)
        endpoints.update(_U32.pack(number), value)
    return "10.244.99.9:8080"


def change_name(node: Node) -> str:
    with opened(node, "service_names") as names:
        key, value = _any(node, names)
        text, protocol, version = abi.SERVICE_NAME.unpack(value)
        name: str = text.rstrip(b"\0").decode()
        if node.random.random() < 0.5:
            names.delete(key)
        else:
            names.update(key, abi.SERVICE_NAME.pack(b"else/where", protocol, version))
    return name


def change_network(node: Node) -> str:
    with opened(node, "local_networks") as networks:
        key, value = _any(node, networks)
        _, address = abi.NETWORK_KEY.unpack(key)
        match node.random.randrange(3):
            case 0:
                networks.delete(key)
            case 1:
                networks.update(key, _U32.pack(_U32.unpack(value)[0] ^ abi.NETWORK_NODE_PORTS))
            case _:
                address = parse_address("192.0.2.77")
                networks.update(abi.NETWORK_KEY.pack(128, address), _U32.pack(abi.NETWORK_LOCAL))
    return format_address(address)


def change_pod_namespace(node: Node) -> str:
    with opened(node, "pod_namespaces") as namespaces:
        key, value = _any(node, namespaces)
        match node.random.randrange(3):
            case 0:
                namespaces.delete(key)
            case 1:
                key = _U64.pack(1 << 40)
                namespaces.update(key, value)
            case _:
                _, v6 = abi.POD_NAMESPACE.unpack(value)
                namespaces.update(key, abi.POD_NAMESPACE.pack(parse_address("192.0.2.77"), v6))
    return f"netns {_U64.unpack(key)[0]}"


def change_device(node: Node) -> str:
    with opened(node, "devices") as devices:
        key, value = _any(node, devices)
        v4, v6, flags, rest = abi.DEVICE.unpack(value)
        match node.random.randrange(3):
            case 0:
                devices.delete(key)
            case 1:
                devices.update(key, abi.DEVICE.pack(v4, v6, flags ^ abi.DEVICE_POD, rest))
            case _:
                devices.update(key, abi.DEVICE.pack(parse_address("192.0.2.1"), v6, flags, rest))
    return links.names()[_U32.unpack(key)[0]]


def change_source_ranges(node: Node) -> str:
    with opened(node, "source_ranges") as ranges:
        key, value = _any(node, ranges)
        _, service, _ = abi.SOURCE_RANGE_KEY.unpack(key)
        if node.random.random() < 0.5:
            ranges.delete(key)
            return _name(node, service)
        number = node.random.choice([service, 999_999])
        ranges.update(abi.SOURCE_RANGE_KEY.pack(32 + 128, number, parse_address("192.0.2.3")), value)
    return _name(node, service) if number == service else "999999"


def change_ping(node: Node) -> str:
    with opened(node, "frontend_addresses") as addresses:
        key, value = _any(node, addresses)
        match node.random.randrange(3):
            case 0:
                addresses.delete(key)
            case 1:
                addresses.update(key, bytes([value[0] ^ abi.PING_FROM_INSIDE]) + value[1:])
            case _:
                key = parse_address("192.0.2.4")
                addresses.update(key, value)
    return f"frontend_addresses: {format_address(key)}"  # type: ignore[arg-type]


def change_port(node: Node) -> str:
    with opened(node, "service_ports") as ports:
        key = _U32.pack(node.random.randrange(ports.shape.max_entries))
        value = bytearray(ports.lookup(key) or b"")
        value[node.random.randrange(len(value))] ^= 1 << node.random.randrange(8)
        ports.update(key, bytes(value))
    return "service_ports"


def change_node(node: Node) -> str:
    with opened(node, "node") as map_:
        value = bytearray(map_.lookup(bytes(4)) or b"")
        field = node.random.choice([each for each in abi.NODE.fields if not each.name.startswith("icmp")])
        value[field.offset + node.random.choice([1, 2])] ^= 0x40
        map_.update(bytes(4), bytes(value))
    return field.name


def _hook_with_link(node: Node) -> str:
    return node.random.choice(sorted(each.name for each in (node.config.bpffs_root / "links").iterdir()))


def detach_hook(node: Node) -> str:
    name = _hook_with_link(node)
    with contextlib.closing(Link.pinned(node.config.bpffs_root / "links" / name)) as link:
        bpf.bpf(bpf.LINK_DETACH, _U32.pack(link.fd), "cannot detach")
    return name


def attach_hook_elsewhere(node: Node) -> str:
    """The link is pinned, and attached to another cgroup."""
    name = _hook_with_link(node)
    hook = next(each for each in SOCKET_HOOKS if each.name == name)
    current = (node.config.bpffs_root / "current").resolve()
    assert node.config.cgroup_root
    below = next(each for each in node.config.cgroup_root.iterdir() if each.is_dir())
    with contextlib.closing(Program.pinned(current / name)) as program:
        cgroup.attach_link(program, below, hook.attach_type, node.config.bpffs_root / "links" / name)
    return name


def detach_device(node: Node) -> str:
    ifindex, side, device = _side(node)
    if tcx.is_supported():
        tcx.detach(node.config.bpffs_root / "devices" / f"{ifindex}_{side}")
    else:
        tc.detach(ifindex, SIDES[side])
    return device


def replace_at_device(node: Node) -> str:
    """Attach the program of the other side."""
    ifindex, side, device = _side(node)
    current = (node.config.bpffs_root / "current").resolve()
    wrong = "from_any" if side == "egress" else "to_any"
    with contextlib.closing(Program.pinned(current / wrong)) as program:
        if tcx.is_supported():
            pin = node.config.bpffs_root / "devices" / f"{ifindex}_{side}"
            tcx.attach(ifindex, SIDES[side], program, pin)
        else:
            tc.attach(ifindex, SIDES[side], program)
    return device


def _side(node: Node) -> tuple[int, str, str]:
    """A side of a device with a program: ifindex, name of the side, name of the device."""
    with contextlib.closing(View(node.config.bpffs_root)) as view:
        found = [
            (row.ifindex, side, row.device) for row in view.devices() for side in SIDES if getattr(row, side)
        ]
    return node.random.choice(found)


def unpin(node: Node) -> str:
    current = (node.config.bpffs_root / "current").resolve()
    pin = node.random.choice(sorted(each for each in current.iterdir() if each.is_file()))
    pin.unlink()
    return f"pin {pin.name}"


def unpin_map(node: Node) -> str:
    pins = sorted((node.config.bpffs_root / "maps").iterdir())
    links_ = {
        each.resolve(): each.name
        for each in (node.config.bpffs_root / "current").resolve().joinpath("maps").iterdir()
    }
    pin = node.random.choice([each for each in pins if each.resolve() in links_])
    name = links_[pin.resolve()]
    pin.unlink()
    return f"pin {name}"


@contextlib.contextmanager
def foreign_at_device(node: Node) -> Iterator[str]:
    ifindex, side, device = _side(node)
    way = others.linked if tcx.is_supported() else others.filtered
    with others.program() as foreign, way(ifindex, SIDES[side], foreign):
        yield f"device {device} {side}: different: runs after"


@contextlib.contextmanager
def foreign_at_hook(node: Node) -> Iterator[str]:
    """Another program is attached before the agent's, which a restart of the agent would also cause."""
    name = _hook_with_link(node)
    hook = next(each for each in SOCKET_HOOKS if each.name == name)
    root, pin = node.config.cgroup_root, node.config.bpffs_root / "links" / name
    assert root
    with (
        contextlib.closing(Program.load(hook.program_type, hook.attach_type, RETURN_1)) as foreign,
        contextlib.closing(Program.pinned((node.config.bpffs_root / "current").resolve() / name)) as own,
    ):
        with contextlib.closing(Link.pinned(pin)) as link:
            bpf.bpf(bpf.LINK_DETACH, _U32.pack(link.fd), "cannot detach")
        cgroup.attach_multi(foreign, root, hook.attach_type, None)
        cgroup.attach_link(own, root, hook.attach_type, pin)
        try:
            yield f"{name}: different: runs after"
        finally:
            cgroup.detach(foreign, root, hook.attach_type)


STAY: tuple[Callable[[Node], str], ...] = (
    *(delete_frontend, change_frontend, add_frontend, move_frontend, change_slot, change_endpoint),
    *(add_endpoint, change_name, change_network, change_device, change_source_ranges, change_ping),
    *(change_port, change_node, detach_hook, attach_hook_elsewhere, detach_device, replace_at_device),
    *(unpin, unpin_map, change_pod_namespace),
)
PASSING = (foreign_at_device, foreign_at_hook)
