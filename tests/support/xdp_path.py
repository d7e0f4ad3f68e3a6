"""The XDP program of bpf/xdp.c next to the classifiers, on the devices of packet_path.py.

All next hops are gateways with permanent neighbors, since the program needs their Ethernet addresses. Pods of
`BEYOND` are on other nodes that share the uplink with the clients.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from scapy.packet import Packet

from ebpfproxy.backends.ebpf import abi
from tests.support.packet_path import XDP as XDP
from tests.support.packet_path import Outcome, PacketPath
from tests.support.packets import HERE, THERE, V4, V6, Places

PASS, TX, REDIRECTED = 2, 3, 4  # XDP_*
BEYOND = {V4: "10.244.3.5", V6: "fd00:3::5"}
GATEWAYS = {V4: "169.254.1.1", V6: "fe80::77"}
SENT = bytes.fromhex((THERE + HERE).replace(":", ""))
"""The Ethernet addresses of a frame to a gateway."""

Result = TypeVar("Result")

_COARSE = 6  # CLOCK_MONOTONIC_COARSE, which the programs read
_ROUTES = {
    "net": ("default", "::/0"),
    "pod": ("10.244.1.0/24", "fd00:1::/64"),
    "tunnel": ("10.244.2.0/24", "fd00:2::/64"),
}


def add_gateways() -> None:
    """Replace the routes of this network namespace by routes to gateways."""
    for name, (v4, v6) in _ROUTES.items():
        for at in (V4, V6):
            _add_neighbor(at, name)
        _ip(f"route replace {v4} via {GATEWAYS[V4]} dev {name} onlink")
        _ip(f"-6 route del {v6} dev {name}")
        _ip(f"-6 route add {v6} via {GATEWAYS[V6]} dev {name} onlink")


@contextlib.contextmanager
def unknown_neighbor(at: Places, device: str) -> Iterator[None]:
    """Within the block, the Ethernet address of this device's gateway is unknown."""
    _ip(f"neigh del {GATEWAYS[at]} dev {device}")
    try:
        yield
    finally:
        _add_neighbor(at, device)


def _add_neighbor(at: Places, device: str) -> None:
    _ip(f"neigh replace {GATEWAYS[at]} lladdr {THERE} dev {device} nud permanent")


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def start_over(path: PacketPath) -> None:
    """Without flows; flows bypass the stack, and the uplinks have the XDP program."""
    path.start_over()
    path.set_node(abi.NODE_REDIRECT)
    for name in ("net", "tunnel"):
        path.set_xdp(name)


def seen_now(path: PacketPath, run: Callable[[], Result], has_passed: Callable[[Result], bool]) -> Result:
    """The result of `run`, with packets of all flows seen in the same second.

    The XDP program passes a packet if the second ends before the packet runs. Only then is it run again: a
    second run of a forwarded packet would count it twice.
    """
    while True:
        now = unit()
        _write(path, last_seen=now)
        result = run()
        if not has_passed(result) or unit() == now:
            return result


def unit() -> int:
    """The number of the current second, as the programs record it in `last_seen` (of 1.07 s)."""
    return time.clock_gettime_ns(_COARSE) >> 30


def establish_all(path: PacketPath) -> None:
    """All flows are established, and their packets were seen now."""
    _write(path, last_seen=unit(), half_open=0)


def _write(path: PacketPath, **fields: int) -> None:
    """Entries of `replies` that only reserve a port are never established, so they stay as they are."""
    for name, layout, entries in (("flows", abi.FLOW, path.flows()), ("replies", abi.REPLY, path.replies())):
        written = [
            (key, layout.pack(*(entry.value | fields).values()))
            for key, entry in entries.items()
            if entry.value.get("client_port", True)
        ]
        path.maps[name].update_all(written)


def by_xdp(path: PacketPath, packet: Packet | bytes, device: str = "net") -> Outcome:
    """The XDP program's outcome for a packet of a flow that was seen in this second."""
    return seen_now(path, lambda: path.xdp(packet, device), lambda outcome: outcome.verdict == PASS)
