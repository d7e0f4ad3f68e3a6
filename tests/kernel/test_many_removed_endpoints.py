"""Ten of fifty endpoints leave their Service, which has 10,000 connections: all of theirs are reset in the
promised time and at the promised rate, and no other.
"""

import collections
import functools
import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpfproxy.lab import Lab, Pod
from ebpfproxy.linux import sysctl
from tests.kernel.cluster import START_PATIENCE, Cluster

pytestmark = [pytest.mark.kernel, pytest.mark.long, pytest.mark.timeout(600)]

CONNECTIONS, ENDPOINTS, LEAVING = 10_000, 50, 10
GRACE, RATE = 5, 500
REST = 5.0
"""Seconds without an end after which the client reports."""


class End(NamedTuple):
    """`at`: in seconds of time.monotonic(); 0.0 if the connection did not end."""

    endpoint: str
    at: float


def client(address: str, wait: float, ready: int) -> list[End]:
    """Open the connections, and note when each ends, until there is no further end for `wait` seconds."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    inherited = sum(1 for _ in Path("/proc/self/fd").iterdir())  # from the worker that was forked
    needed = CONNECTIONS + 200 + inherited
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    names: dict[int, tuple[socket.socket, str]] = {}
    ends: dict[int, float] = {}
    with select.epoll() as poll:
        for _ in range(CONNECTIONS):
            sock = socket.create_connection((address, 80), timeout=60)
            sock.sendall(b"?")
            names[sock.fileno()] = sock, sock.recv(100).decode()
            poll.register(sock, select.EPOLLIN | select.EPOLLRDHUP)
        os.write(ready, b"!")
        while found := poll.poll(wait, 1024):
            now = time.monotonic()
            for fd, _ in found:
                poll.unregister(fd)
                ends[fd] = now
            wait = min(wait, REST)
    return [End(name, ends.get(fd, 0.0)) for fd, (_, name) in names.items()]


@pytest.fixture(params=["ebpf", "ebpf-off", "nftables"])
def crowd(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, list[Pod]]]:
    """A node with an agent and servers. Its pod p may use nearly all ports."""
    mode, _, off = request.param.partition("-")
    with Lab("test-removed", 77) as lab, Cluster(lab, mode) as made:
        made.p.call(functools.partial(sysctl.ensure, "net/ipv4/ip_local_port_range", "1024 65535"))
        servers = [lab.pod(f"e{number}") for number in range(ENDPOINTS)]
        for each in servers:
            made.serve(each)
        flags = [f"--removed-endpoints-grace={GRACE}s", f"--removed-endpoints-rate={RATE}"]
        made.start(*flags, *(["--socket-lb=off"] if off else []))
        yield made, servers


@pytest.mark.parametrize("request_", ["reset", "keep"])
def test_all_connections_to_removed_endpoints_are_reset_at_the_rate(
    crowd: tuple[Cluster, list[Pod]], request_: str
) -> None:
    cluster, servers = crowd
    web = cluster.service()
    web.annotations["ebpfproxy/removed-endpoints"] = request_
    web.to(*servers)
    call = cluster.p.start_until_ready(functools.partial(client, web.v4, GRACE + 10.0))
    try:
        removed = time.monotonic()
        web.to(*servers[LEAVING:])
        in_force = time.monotonic()
        ends = call.result(START_PATIENCE)
    finally:
        call.kill()
    leaving = {each.name for each in servers[:LEAVING]}
    assert {each.endpoint for each in ends if each.at} == (leaving if request_ == "reset" else set())
    if request_ == "keep":
        return
    ended = sorted(each.at for each in ends if each.endpoint in leaving)
    assert all(ended), "each of them is reset"
    assert ended[0] >= removed + GRACE
    in_each_second = collections.Counter(int(each - ended[0]) for each in ended)
    print(
        f"{len(ended)} connections, first reset {ended[0] - in_force:.2f} s and last one "
        f"{ended[-1] - in_force:.2f} s after the change; in a second at most {max(in_each_second.values())}"
    )
    assert ended[-1] >= removed + GRACE + (len(ended) - 1) / RATE
    assert cluster.metric("ebpfproxy_connections_reset_total") == len(ended)
