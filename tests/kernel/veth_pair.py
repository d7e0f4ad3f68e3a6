"""A namespace with a veth pair, and a flood of packets that arrives at it."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.kernel.cluster import eventually
from tests.support.namespace import Namespace, namespace


@contextlib.contextmanager
def veth_pair(name: str) -> Iterator[Namespace]:
    """A namespace with a veth pair n0 and n1, both up. Within the block, the calling thread is in it."""
    with namespace(name) as made:
        made.ip("link set lo up", "link add n0 type veth peer name n1")
        made.ip("link set n0 addrgenmode none", "link set n1 addrgenmode none")
        made.ip("link set n0 up", "link set n1 up")
        with made.entered():
            yield made


_FLOOD = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.connect(("10.255.20.1", 9))
    for _ in range(100_000_000):  # some minutes, if the process is not killed
        sock.send(b"x")
"""


@contextlib.contextmanager
def _flooded(peer: Namespace) -> Iterator[None]:
    """Within the block, one process sends packets to 10.255.20.1 port 9 as fast as possible."""
    command = ["ip", "netns", "exec", peer.name, sys.executable, "-c", _FLOOD]
    sender = subprocess.Popen(command)
    try:
        yield
        assert sender.poll() is None
    finally:
        sender.kill()
        sender.wait()


def received(node: Namespace) -> int:
    """The number of packets that arrived at n0."""
    command = ["ip", "-n", node.name, "-json", "-stats", "link", "show", "dev", "n0"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return int(shown[0]["stats64"]["rx"]["packets"])


@contextlib.contextmanager
def flood_arrives(node: Namespace) -> Iterator[socket.socket]:
    """Within the block, a flood arrives at n0. The socket receives each packet that no program drops."""
    with namespace("tc-peer") as peer:
        node.ip(
            "link set n0 address 02:00:00:00:20:01",
            "addr add 10.255.20.1/24 dev n0",
            f"link set n1 netns {peer.name}",
        )
        peer.ip("link set n1 up", "addr add 10.255.20.2/24 dev n1")
        peer.ip("neigh add 10.255.20.1 lladdr 02:00:00:00:20:01 dev n1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as arriving:
            arriving.bind(("10.255.20.1", 9))
            arriving.setblocking(False)
            with _flooded(peer):
                eventually(lambda: received(node) > 1_000, "the flood begins")
                yield arriving


def assert_none_arrives(node: Namespace, step: Callable[[int], object], *, times: int, least: int) -> None:
    """Call `step` with the numbers 0 to `times` - 1 while at least `least` packets arrive at n0. None of them
    may pass the programs there."""
    with flood_arrives(node) as arriving:
        before = received(node)
        for count in range(times):
            step(count)
        assert received(node) - before > least
        with pytest.raises(BlockingIOError):
            arriving.recv(1)
