"""The classifiers of bpf/tc.c on packets made by scapy, with maps as the agent writes them. Needs root.

The node, whose devices are in a network namespace of their own:

    net     the uplink: everybody outside      192.0.2.10      2001:db8::10
    pod     a pod of this node                 10.244.1.1      fd00:1::1
    tunnel  to the pods of other nodes         10.244.1.2      fd00:1::2

Programs run by themselves here, so what the node's stack does in between is left to the test, or to
`forward`, which hands a packet from ingress to egress as a router would.
"""

import contextlib
import dataclasses
import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scapy.layers.l2 import Ether
from scapy.packet import Packet

from ebpfproxy.backends.ebpf import abi, features
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey, render
from ebpfproxy.backends.ebpf.flows.connections import Connections
from ebpfproxy.backends.ebpf.flows.state import FlowTimeouts
from ebpfproxy.backends.ebpf.flows.sweep import FlowMaps, FlowSweep, Swept
from ebpfproxy.backends.ebpf.hooks import TAIL_CALLS
from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES, Maps, MapSizes
from ebpfproxy.backends.ebpf.services.service_cidrs import bounds
from ebpfproxy.backends.ebpf.services.table import ServiceTable
from ebpfproxy.linux.bpf import compiler, tc
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.loader import ProgramSpec, load_and_pin
from ebpfproxy.linux.bpf.test_run import TestRuns
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import format_address, parse_address, parse_network
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.service import Service
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import PlanContext, ServicePortPlan
from tests.support.bpf_place import BpfPlace, build_maps
from tests.support.build import CONTEXT, node
from tests.support.clock import Clock
from tests.support.packets import HERE
from tests.support.xdp_test_runs import XdpTestRuns

UNSPEC, SHOT, REDIRECT = -1, 2, 7  # TC_ACT_*: other filters go on; dropped; sent out of a device
MARK_DONE, MARK_STRIPPED, MARK_RECEIVED = 0xEB03, 0xEB04, 0xEB05

SIZES = MapSizes(
    services=512,
    slots=32768,
    endpoints=2048,
    affinity=256,
    sockets=64,
    flows=131072,  # room for one entry for each port of an address
    source_ranges=256,
    traffic=512,
)
PROGRAMS = ("from_any", "from_any_l3", "to_any", "receive_tunneled", *TAIL_CALLS)
XDP = "xdp_forward"
TUNNEL_NETWORK = 1  # that of dsr.h
NODE_V4, NODE_V6 = "192.0.2.10", "2001:db8::10"


_SCHED_CLS, _XDP = 3, 6
_LAYOUTS = {"flows": abi.FLOW, "replies": abi.REPLY}
_ALL_LAYOUTS = _LAYOUTS | {"tunneled_flows": abi.TUNNELED_FLOW}
_U32 = struct.Struct("=I")
_REST = 3600.0  # seconds after which whatever was freed may be used again


class Side(NamedTuple):
    """A device, as the table above has it."""

    v4: str
    v6: str
    flags: int


DEVICES = {
    "net": Side(NODE_V4, NODE_V6, 0),
    "pod": Side("10.244.1.1", "fd00:1::1", abi.DEVICE_POD),
    "tunnel": Side("10.244.1.2", "fd00:1::2", 0),
}

_ROUTES = {
    "default": "net",
    "10.244.1.0/24": "pod",
    "10.244.2.0/24": "tunnel",
    "::/0": "net",
    "fd00:1::/64": "pod",
    "fd00:2::/64": "tunnel",
}

TIMEOUTS = {
    "tcp_established": 86400,
    "tcp_close_wait": 3600,
    "tcp_syn": 60,
    "tcp_fin": 30,
    "udp": 30,
    "udp_stream": 180,
}


class Entry(NamedTuple):
    """An entry of a flow in `flows` or `replies`; `key` and `value` by the fields of abi.h."""

    key: dict[str, Any]
    value: dict[str, Any]


class Outcome(NamedTuple):
    """What became of a packet. `mark` is what the next program is told of it."""

    verdict: int
    raw: bytes
    mark: int

    @property
    def packet(self) -> Ether:
        return Ether(self.raw)


@dataclasses.dataclass
class _Programs:
    """Loaded once; `run` is by program, device and where the packet came in."""

    directory: Path
    indices: Mapping[str, int]

    def __post_init__(self) -> None:
        self.loaded = {name: Program.pinned(self.directory / name) for name in (*PROGRAMS, XDP)}
        self._runs: dict[tuple[str, int, int, int], TestRuns] = {}

    def runs(self, program: str, device: str, came_in: str, mark: int) -> TestRuns:
        key = program, self.indices[device], self.indices.get(came_in, 0), mark
        if key not in self._runs:
            _, index, ingress, _ = key
            self._runs[key] = (
                XdpTestRuns(self.loaded[program], ifindex=index)
                if program == XDP
                else TestRuns(self.loaded[program], ifindex=index, ingress_ifindex=ingress, cb=mark)
            )
        return self._runs[key]

    def close(self) -> None:
        for program in self.loaded.values():
            program.close()


class PacketPath:
    """Programs and maps; `packet_path` makes one. The calling thread is in its namespace."""

    def __init__(self, maps: Path, programs: Path) -> None:
        self.folder = maps
        self.maps = Maps(maps)
        self.indices = {name: socket.if_nametoindex(name) for name in DEVICES}
        self._programs = _Programs(programs, self.indices)
        self._clock = Clock()
        self._table = ServiceTable(self.maps, self._clock)
        self._entries: dict[ServicePortKey, ServicePortEntry] = {}
        self._counted: dict[str, int] = {}
        self.start_over()

    def close(self) -> None:
        self._table.close()
        self._programs.close()
        self.maps.close()

    def start_over(self) -> None:
        """No Services and no flows; the node and its devices as at the top of this file."""
        self.serve_nothing()
        self.forget_flows()
        self.forget_ports()
        self._empty("exhausted_ports", "tunnel_sources")
        self._empty("netfilter_flows", "affinity", "bypassing")
        self._empty("local_networks", "devices", "xdp_devices")
        self.set_node()
        for name, side in DEVICES.items():
            self.set_device(name, side.v4, side.v6)
        for address in (NODE_V4, NODE_V6, *(a for side in DEVICES.values() for a in (side.v4, side.v6))):
            self.set_local(address, node_ports=address in (NODE_V4, NODE_V6))
        self.set_local("127.0.0.0/8", node_ports=False)
        self._counted = self._counters()

    def forget_flows(self) -> None:
        self._empty("flows", "replies", "fragments", "tunneled_flows")
        self.set_established(0)

    def forget_ports(self) -> None:
        """As on a node whose ports no flow has used yet."""
        ports = self.maps["flow_ports"]
        unused = bytes(ports.shape.value_size)
        ports.update_all([(key, unused) for key, used in ports.items() if used != unused])

    def _empty(self, *names: str) -> None:
        for name in names:
            for key, _ in list(self.maps[name].items()):
                self.maps[name].delete(key)

    # What the agent writes

    def set_node(
        self,
        flags: int = 0,
        inner: int = 0,
        icmp_rate: int = 1_000_000,
        tunnel_device: int = 0,
        tunnel_mtu: int = 0,
        **timeouts: int,
    ) -> None:
        """The one entry of `node`; timeouts in seconds, kube-proxy's unless given. The cookie is 0, by which
        the marks are those that are written here. `tunnel_device` is an ifindex."""
        seconds = TIMEOUTS | timeouts
        values = (
            0,
            flags,
            inner,
            *(seconds[name] for name in TIMEOUTS),
            icmp_rate,
            icmp_rate,
            tunnel_device,
            tunnel_mtu,
            *bounds(()),
        )
        self.maps["node"].update(_U32.pack(0), abi.NODE.pack(*values))

    def set_service_cidrs(self, *networks: str) -> None:
        """After `set_node`."""
        parsed = list(map(parse_network, networks))
        for net in parsed:
            key = abi.NETWORK_KEY.pack(net.length, net.address)
            self.maps["local_networks"].update(key, _U32.pack(abi.NETWORK_SERVICE_CIDR))
        *others, _, _, _, _ = abi.NODE.unpack(self.maps["node"].lookup(_U32.pack(0)) or b"")
        self.maps["node"].update(_U32.pack(0), abi.NODE.pack(*others, *bounds(parsed)))

    def set_device(
        self,
        name: str,
        v4: str = "0.0.0.0",
        v6: str = "::",
        flags: int = 0,
        bridge: str = "00:00:00:00:00:00",
    ) -> None:
        """`flags`: in addition to those of the device. `bridge`: the address of its bridge."""
        value = abi.DEVICE.pack(
            parse_address(v4),
            parse_address(v6),
            DEVICES[name].flags | flags,
            bytes.fromhex(bridge.replace(":", "")),
        )
        self.maps["devices"].update(_U32.pack(self.indices[name]), value)

    def set_xdp(self, name: str, flags: int = abi.XDP_SENDS | abi.XDP_SENDS_BACK) -> None:
        """The device has the XDP program, and can send by these flags. Its Ethernet address is HERE."""
        value = abi.XDP_DEVICE.pack(bytes.fromhex(HERE.replace(":", "")), flags)
        self.maps["xdp_devices"].update(_U32.pack(self.indices[name]), value)

    def set_local(self, network: str, *, node_ports: bool) -> None:
        net = parse_network(network if "/" in network else f"{network}/{128 if ':' in network else 32}")
        flags = abi.NETWORK_LOCAL | (abi.NETWORK_NODE_PORTS if node_ports else 0)
        self.maps["local_networks"].update(abi.NETWORK_KEY.pack(net.length, net.address), _U32.pack(flags))

    def set_foreign(self, network: str) -> None:
        """Addresses of the network may be those of other machines."""
        net = parse_network(network)
        key = abi.NETWORK_KEY.pack(net.length, net.address)
        self.maps["local_networks"].update(key, _U32.pack(abi.NETWORK_FOREIGN))

    def set_tunnel_source(self, network: str) -> None:
        """Packets of these nodes are accepted by direct server return."""
        net = parse_network(network)
        key = abi.NETWORK_KEY.pack(net.length, net.address)
        self.maps["tunnel_sources"].update(key, _U32.pack(1))

    def serve(
        self,
        service: Service,
        *slices: EndpointSlice,
        context: PlanContext = CONTEXT,
        tunnels: Mapping[str, str | None] | None = None,
    ) -> None:
        """A Service as it is now, from what the API server says to the maps. `tunnels`: with direct server
        return; by endpoint, the node that accepts tunneled packets."""
        plans = plan_service(service, slices, node(addresses=(NODE_V4, NODE_V6)), context)
        if tunnels is not None:
            plans = tuple(_with_tunnels(plan, tunnels) for plan in plans)
        entries = render(plans, None, ())
        puts = {key: entry for key, entry in entries.items() if isinstance(key, ServicePortKey)}
        self._apply({key: entry for key, entry in puts.items() if isinstance(entry, ServicePortEntry)}, [])

    def serve_nothing(self) -> None:
        self._apply({}, list(self._entries))

    def _apply(self, puts: dict[ServicePortKey, ServicePortEntry], drops: list[ServicePortKey]) -> None:
        rejected = self._table.apply(puts, drops)
        assert not rejected, rejected
        self._entries = {k: e for k, e in self._entries.items() if k not in drops} | puts
        self._clock.now += _REST

    # Packets

    def ingress(
        self, packet: Packet | bytes, device: str = "net", mark: int = 0, program: str = "from_any"
    ) -> Outcome:
        """A packet comes in by a device. With `from_any_l3` its Ethernet header is taken for something that a
        tunnel left, since a test run begins with that in any case."""
        return self._run(self._programs.runs(program, device, device, mark), packet)

    def xdp(self, packet: Packet | bytes, device: str = "net") -> Outcome:
        """A packet comes in by a device with the XDP program. The verdict is one of XDP_*."""
        return self._run(self.runs_xdp(device), packet)

    def egress(
        self, packet: Packet | bytes, device: str = "net", mark: int = 0, came_in: str = "pod"
    ) -> Outcome:
        """A packet leaves by a device; `came_in` is "" for one of the node's own."""
        return self._run(self.runs_out(device, came_in, mark), packet)

    def forward(self, packet: Packet | bytes, device: str, to: str) -> Outcome:
        """In by `device`, out by `to`. What does not pass ingress goes no further. What is sent back to
        ingress as it is, since a port had to be searched for, comes in once more."""
        before = self.ingress(packet, device)
        if before.verdict == REDIRECT and before.raw == bytes(packet):
            before = self.ingress(packet, device, before.mark)
        return before if before.verdict != UNSPEC else self.egress(before.raw, to, before.mark, device)

    def runs_in(self, device: str, mark: int = 0) -> TestRuns:
        """For many packets: all of the same device and mark."""
        return self._programs.runs("from_any", device, device, mark)

    def runs_xdp(self, device: str) -> TestRuns:
        return self._programs.runs(XDP, device, "", 0)

    def runs_out(self, device: str, came_in: str, mark: int = 0) -> TestRuns:
        return self._programs.runs("to_any", device, came_in, mark)

    def receive(
        self,
        packet: Packet | bytes,
        sender: str,
        endpoint: str,
        port: int,
        network: int = TUNNEL_NETWORK,
        **option: int,
    ) -> Outcome:
        """A packet comes in by the Geneve device, with the option of direct server return. `network`: the
        virtual network identifier; `option`: fields of abi.h's tunnel_option that differ from the usual
        ones."""
        fields = {
            name: abi.CONSTANTS[f"TUNNEL_OPTION_{name.upper()}"] for name in ("type", "length", "version")
        }
        fields = {"option_class": abi.CONSTANTS["TUNNEL_OPTION_CLASS"], **fields} | option
        packed = abi.TUNNEL_OPTION.pack(
            socket.htons(fields["option_class"]),
            *(fields["type"], fields["length"], parse_address(endpoint), socket.htons(port)),
            *(fields["version"], 0),
        )
        runs = self._programs.runs("receive_tunneled", "tunnel", "tunnel", 0)
        return self._run(runs, bytes(packet) + packed + parse_address(sender) + _U32.pack(network))

    @staticmethod
    def _run(runs: TestRuns, packet: Packet | bytes) -> Outcome:
        verdict, raw = runs.run(bytes(packet))
        return Outcome(verdict, bytes(raw), runs.cb)

    @contextlib.contextmanager
    def wire(self, device: str) -> Iterator[socket.socket]:
        """What the socket sends comes in by the device itself, at whose ingress its program is meanwhile."""
        tc.attach(self.indices[device], tc.Side.INGRESS, self._programs.loaded["from_any"])
        try:
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
                sock.bind((f"{device}-peer", 0))
                yield sock
        finally:
            tc.detach(self.indices[device], tc.Side.INGRESS)

    def program(self, name: str) -> Program:
        """One of PROGRAMS."""
        return self._programs.loaded[name]

    # What the programs keep

    def tunneled(self) -> dict[bytes, Entry]:
        """All entries of flows that are sent to other nodes by direct server return, by key."""
        return self._entries_of("tunneled_flows")

    def flows(self) -> dict[bytes, Entry]:
        """All entries by which clients' packets are found, by key."""
        return self._entries_of("flows")

    def replies(self) -> dict[bytes, Entry]:
        """All entries by which endpoints' packets are found, by key."""
        return self._entries_of("replies")

    def _entries_of(self, name: str) -> dict[bytes, Entry]:
        pairs = self.maps[name].items()
        return {k: Entry(_fields(abi.FLOW_KEY, k), _fields(_ALL_LAYOUTS[name], v)) for k, v in pairs}

    def traffic(self) -> tuple[int, ...]:
        """The sums over all Services and CPUs, in the order of abi.h's traffic."""
        rows = (row for _, value in self.maps["traffic"].items() for row in abi.TRAFFIC.iter_unpack(value))
        return tuple(map(sum, zip(*rows, strict=True)))

    def set_established(self, connections: int, others: int = 0) -> None:
        """How many TCP and other flows the programs take to be established."""
        for kind, number in ((abi.FLOWS_OF_TCP, connections), (abi.FLOWS_OF_OTHERS, others)):
            self.maps["established_flows"].update(_U32.pack(kind), _U32.pack(number))

    def established(self) -> int:
        """How many flows the programs take to be established."""
        return sum(
            int.from_bytes(number, sys.byteorder, signed=True)
            for _, number in self.maps["established_flows"].items()
        )

    def age(self, seconds: float) -> None:
        """Entries have seen no packet for so much longer, to two seconds."""
        units = math.ceil(seconds * 1e9 / (1 << 30))
        for name, layout in _LAYOUTS.items():
            for key, value in list(self.maps[name].items()):
                older = _fields(layout, value)
                older["last_seen"] = max(0, older["last_seen"] - units)
                self.maps[name].update(key, layout.pack(*older.values()))

    def sweep(self, **timeouts: int) -> Swept:
        """What the agent's collector does all the time; timeouts as for `set_node`."""
        return self._sweep(None, TIMEOUTS | timeouts)

    def _sweep(self, connections: Connections | None, timeouts: Mapping[str, int]) -> Swept:
        with contextlib.closing(self.maps["endpoints"].mapped()) as endpoints:
            flows, replies, established = (self.maps[n] for n in ("flows", "replies", "established_flows"))
            of = FlowMaps(flows, replies, established, endpoints)
            sweep = FlowSweep(of, FlowTimeouts(**timeouts), connections=connections)
            return sweep.run(lambda _: False)

    def sweep_and_count(self) -> None:
        """As `sweep`, which also counts the open connections of endpoints."""
        with contextlib.closing(self.maps["endpoints"].mapped()) as endpoints:
            connections = Connections(self.maps["connections"], self.maps["socket_peers"], endpoints)
            self._sweep(connections, TIMEOUTS)

    def counted(self) -> dict[str, int]:
        """The counters that went up since `start_over` or the last call, by how much."""
        now = self._counters()
        found = {name: n - self._counted.get(name, 0) for name, n in now.items()}
        self._counted = now
        return {name: n for name, n in found.items() if n}

    def _counters(self) -> dict[str, int]:
        sums = {
            _U32.unpack(k)[0]: sum(struct.unpack(f"={len(v) // 8}Q", v))
            for k, v in self.maps["counters"].items()
        }
        return {abi.COUNTERS[index]: n for index, n in sums.items() if index in abi.COUNTERS}


def _with_tunnels(plan: ServicePortPlan, tunnels: Mapping[str, str | None]) -> ServicePortPlan:
    nodes = (tunnels.get(format_address(each.address)) for each in plan.endpoints)
    found = tuple(parse_address(each) if each else None for each in nodes)
    balancing = plan.balancing._replace(algorithm=Algorithm.MAGLEV, tunnels=found)
    return dataclasses.replace(plan, balancing=balancing)


def _fields(layout: abi.Layout, packed: bytes) -> dict[str, Any]:
    return dict(zip((field.name for field in layout.fields), layout.unpack(packed), strict=True))


@contextlib.contextmanager
def packet_path(
    place: BpfPlace,
    sizes: MapSizes = SIZES,
    source: Path | None = None,
    *,
    at_devices: bool = False,
    absent: Collection[str] = (),
) -> Iterator[PacketPath]:
    """Compile, load, make the devices, and be in their namespace within the block. `at_devices`: the programs
    are for real devices, where notes to the next program are in another place than in test runs. `absent`:
    features of this kernel that the programs do not use."""
    maps = build_maps(place, sizes, f"packet-path-{time.monotonic_ns()}")
    defines = COMPILED_SIZES.defines() | ({} if at_devices else {"MARK_IN_CB": "1"})
    folder = source.parent if source else abi.source_directory()
    tunneled = Path(__file__).with_name("tunneled.c")
    file, _ = compiler.compiled([source or folder / "tc.c", folder / "xdp.c", tunneled], defines)
    specs = *(ProgramSpec(name, _SCHED_CLS, 0) for name in PROGRAMS), ProgramSpec(XDP, _XDP, 0)
    programs = maps.parent / "loaded"
    numbers = sizes.numbers() | features.numbers(features.present() - set(absent))
    load_and_pin(file, specs, numbers, maps, programs, TAIL_CALLS)
    with _devices(), contextlib.closing(PacketPath(maps, programs)) as made:
        yield made


@contextlib.contextmanager
def _devices() -> Iterator[None]:
    """veth pairs, since every kernel that runs pods has those; the other ends have no part."""
    name = f"ebpfproxy-packets-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    netns.create(name)
    try:
        with netns.entered(netns.path(name)):
            commands = ["link set lo up"]
            for device, side in DEVICES.items():
                commands.append(f"link add {device} address {HERE} type veth peer name {device}-peer")
                commands.append(f"addr add {side.v4}/32 dev {device}")
                commands.append(f"addr add {side.v6}/128 dev {device} nodad")
                commands += [f"link set {device} up", f"link set {device}-peer up"]
            commands += [f"route add {network} dev {device}" for network, device in _ROUTES.items()]
            for switch in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):  # or no route is for forwarding
                Path("/proc/sys/net", switch).write_text("1")
            subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)
            yield
    finally:
        netns.delete(name)
