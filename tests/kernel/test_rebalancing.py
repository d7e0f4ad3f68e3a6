"""Long connections after an endpoint was added: clients whose connection is reset connect again, until the
endpoint has its share.
"""

import contextlib
import functools
import json
import os
import select
import socket
import time
from collections import Counter
from typing import NamedTuple

import pytest

from ebpfproxy.plan.endpoint_reasons import EndpointReason
from tests.kernel.cluster import START_PATIENCE, TCP_TARGET, Cluster, eventually
from tests.kernel.two_nodes import TwoNodes, name_and_client

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.ways("ebpf-on", "ebpf-off", "nftables", "iptables", "ipvs"),
    pytest.mark.timeout(300),
]

CONNECTIONS = 40
QUIET = 14.0
"""Seconds without a reset after which nothing moves any more: more than two steps."""


class Report(NamedTuple):
    """`resets`: how many connections ended. `counts`: the connections of each endpoint at the end."""

    resets: int
    counts: dict[str, int]


def opened(address: str) -> tuple[socket.socket, str]:
    sock = socket.create_connection((address, 80), timeout=20)
    sock.sendall(b"?")
    return sock, name_and_client(sock.recv(100).decode())[0]


def client(address: str, ready: int) -> Report:
    """Keep CONNECTIONS open: one that ends is replaced. Ends when none has ended for QUIET seconds."""
    held = dict(opened(address) for _ in range(CONNECTIONS))
    os.write(ready, b"!")
    resets, last = 0, time.monotonic()
    while time.monotonic() < last + QUIET:
        for sock in select.select(list(held), [], [], 0.2)[0]:
            del held[sock]
            sock.close()
            resets, last = resets + 1, time.monotonic()
            held.update([opened(address)])
    return Report(resets, Counter(held.values()))


def test_an_added_endpoint_gets_its_share_of_open_connections(two_nodes: TwoNodes) -> None:
    """Both families at once, since most of the time passes between the steps."""
    web = two_nodes.everywhere()
    web.annotations["ebpfproxy/rebalance"] = "100"
    web.to(two_nodes.a, two_nodes.b, two_nodes.d)
    with contextlib.ExitStack() as stack:
        calls = []
        for family in ("v4", "v6"):
            calls.append(two_nodes.p.start_until_ready(functools.partial(client, web.address(family))))
            stack.callback(calls[-1].kill)
        web.to(two_nodes.a, two_nodes.b, two_nodes.d, two_nodes.e)
        for call in calls:
            found = call.result(START_PATIENCE)
            share = CONNECTIONS / 4
            assert found.resets <= 1.1 * share
            assert abs(found.counts["e"] - share) <= 1
            assert sum(found.counts.values()) == CONNECTIONS


@pytest.mark.backends("ebpf", "nftables")
def test_commands_know_which_endpoints_get_no_new_connections(cluster: Cluster) -> None:
    """The plan of the agent differs from that of other programs meanwhile."""
    web = cluster.service()
    web.annotations["ebpfproxy/rebalance"] = "1"
    web.to(cluster.a)
    call = cluster.p.start_until_ready(functools.partial(client, web.v4))
    try:
        web.to(cluster.a, cluster.b)
        eventually(lambda: bool(full_endpoints(cluster)), "a full endpoint")
        assert full_endpoints(cluster) == [f"{cluster.a.v4}:{TCP_TARGET}"]
        flags = (
            f"--proxy-mode={cluster.mode}",
            f"--manifests={cluster.folder}",
            f"--hostname-override={cluster.lab.node_name}",
            "--detect-local-mode=InterfaceNamePrefix",
            "--pod-interface-name-prefix=veth",
        )
        verified = cluster.ebpfproxy("verify", *flags, check=False)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        explained = cluster.ebpfproxy("explain", f"{web.v4}:80", "--kernel=true", *flags, check=False)
        assert EndpointReason.FULL.meaning in explained.stdout, explained.stdout + explained.stderr
        assert full_endpoints(cluster), "it still lasts"
    finally:
        call.kill()


def full_endpoints(cluster: Cluster) -> list[str]:
    services = json.loads(cluster.http_get("rebalancing"))["services"]
    return [endpoint for each in services for endpoint in each["fullEndpoints"]]
