"""Measures how soon connections to unused ClusterIPs fail in mode ebpf. As root, in namespaces of its own:

python -m tests.refusals
"""

import functools
import itertools
import socket
import time
from collections.abc import Iterator

from ebpfproxy.lab import Lab, Pod, PodNetwork
from ebpfproxy.linux import sysctl
from tests.kernel.two_nodes import TwoNodes

ATTEMPTS = 1000
_FIRST_PORT = 7000


def _durations(address: str, kind: socket.SocketKind) -> list[float]:
    """The durations of all attempts in milliseconds, sorted. Each attempt has another port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = []
    for port in range(_FIRST_PORT, _FIRST_PORT + ATTEMPTS):
        with socket.socket(family, kind) as client:
            client.settimeout(5.0)
            began = time.perf_counter()
            try:
                client.connect((address, port))
                client.send(b"?")
                client.recv(1)
            except ConnectionRefusedError:
                found.append((time.perf_counter() - began) * 1000)
    assert len(found) == ATTEMPTS, f"{ATTEMPTS - len(found)} attempts were not refused"
    return sorted(found)


def _rows(at: TwoNodes) -> Iterator[str]:
    web = at.service().to(at.a)
    addresses = {"unallocated": ("10.96.200.7", "fd00:10:96::c807"), "unused port": (web.v4, web.v6)}
    clients: dict[str, Pod] = {"pod": at.p, "node": at.node, "outside": at.x}
    kinds = {"TCP": socket.SOCK_STREAM, "UDP": socket.SOCK_DGRAM}
    for (client, netns), (what, both), (name, kind) in itertools.product(
        clients.items(), addresses.items(), kinds.items()
    ):
        for address in both:
            found = netns.call(functools.partial(_durations, address, kind))
            median, late = found[ATTEMPTS // 2], found[ATTEMPTS * 99 // 100]
            yield f"| {client} | {what} | {name} | {address} | {median:.3f} | {late:.3f} |"


def main() -> None:
    """Print a row for each client, kind of address, protocol and family."""
    print("| client | address | protocol | | p50 (ms) | p99 (ms) |\n|---|---|---|---|---|---|")
    with Lab("refusals", 92, PodNetwork.ROUTED) as lab, TwoNodes(lab) as at:
        for name in ("net/ipv4/icmp_msgs_per_sec", "net/ipv4/icmp_msgs_burst"):
            at.node.call(functools.partial(sysctl.ensure, name, "1000000"))
        at.start()
        for row in _rows(at):
            print(row, flush=True)


if __name__ == "__main__":
    main()
