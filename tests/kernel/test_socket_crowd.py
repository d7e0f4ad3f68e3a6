"""Very many connected UDP sockets keep working when their endpoint is replaced.

`pytest -s --udp-sockets=100000` prints how long the reconnection takes.
"""

import contextlib
import functools
import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ebpfproxy.backends.ebpf.sockets.stale_sockets import RECONNECTED
from ebpfproxy.lab import Lab
from ebpfproxy.lab.netns import Call
from ebpfproxy.linux import sysctl
from tests.kernel.cluster import PATIENCE, START_PATIENCE, Cluster

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600)]

EACH = 12_500
"""Sockets per process: less than the usual hard limit of open files."""
ROUND = 1.0
"""Seconds to wait for answers before the sockets without an answer send again."""


class Report(NamedTuple):
    """`finished` is in seconds of time.monotonic(); `unanswered` counts datagrams."""

    finished: float
    unanswered: int
    previous: int


def answered(socks: dict[int, socket.socket], poll: "select.epoll") -> dict[int, bytes]:
    """Have all of them send, and return the answers that arrive before a second without any."""
    found: dict[int, bytes] = {}
    for index, sock in enumerate(socks.values()):
        sock.send(b"?")
        if index % 16 == 15:  # the server's receive queue holds some hundreds
            found |= received(socks, poll, 0.01)
    while len(found) < len(socks) and (more := received(socks, poll, ROUND)):
        found |= more
    return found


def received(socks: dict[int, socket.socket], poll: "select.epoll", patience: float) -> dict[int, bytes]:
    ready = [fd for fd, _ in poll.poll(patience, 1024) if fd in socks]
    return {fd: socks[fd].recv(100) for fd in ready}


def client(address: str, count: int, go: int, ready: int) -> Report:
    """Connect `count` sockets, wait for `go`, and use them until the server b has answered on each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    made = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    with select.epoll() as poll:
        for sock in made:
            sock.connect((address, 53))
            poll.register(sock, select.EPOLLIN)
        pending = {sock.fileno(): sock for sock in made}
        while pending:
            for fd in answered(pending, poll):
                del pending[fd]
        os.write(ready, b"!")
        os.read(go, 1)
        pending = {sock.fileno(): sock for sock in made}
        unanswered = previous = 0
        while pending:
            found = answered(pending, poll)
            unanswered += len(pending) - len(found)
            previous += sum(answer == b"a" for answer in found.values())
            for fd in (fd for fd, answer in found.items() if answer == b"b"):
                del pending[fd]
        return Report(time.monotonic(), unanswered, previous)


@pytest.fixture
def many_ports() -> Iterator[Cluster]:
    """A node with an agent. Its pods p and q may use nearly all ports."""
    with Lab("test-crowd", 69) as lab, Cluster(lab) as made:
        for pod in (made.p, made.q):
            pod.call(functools.partial(sysctl.ensure, "net/ipv4/ip_local_port_range", "1024 65535"))
        made.start()
        yield made


def test_very_many_udp_sockets_keep_working_when_their_endpoint_is_replaced(
    many_ports: Cluster, request: pytest.FixtureRequest
) -> None:
    total: int = request.config.getoption("--udp-sockets")
    dns = many_ports.service().to(many_ports.a)
    waiting, go = os.pipe()
    counts = [min(EACH, total - begun) for begun in range(0, total, EACH)]
    calls: list[Call[Report]] = []
    with contextlib.ExitStack() as stack:
        for index, count in enumerate(counts):
            pod = (many_ports.p, many_ports.q)[index % 2]
            call = pod.start_until_ready(functools.partial(client, dns.v4, count, waiting))
            stack.callback(call.kill)
            calls.append(call)
        started = time.monotonic()
        dns.to(many_ports.b)
        in_force = time.monotonic()
        os.write(go, b"!" * len(counts))
        line = many_ports.agent.await_line(lambda line: RECONNECTED in line.text, timeout=PATIENCE)
        reports = [call.result(START_PATIENCE) for call in calls]
    os.close(waiting)
    os.close(go)
    assert int(line.values["sockets"]) == total
    print(
        f"{total} sockets: reconnected in {line.values['seconds']} s; the last one answered by the new "
        f"endpoint {max(each.finished for each in reports) - started:.2f} s after the change was written "
        f"({in_force - started:.2f} s until it was in force); "
        f"{sum(each.previous for each in reports)} answers of the previous endpoint meanwhile; "
        f"{sum(each.unanswered for each in reports)} datagrams unanswered"
    )
