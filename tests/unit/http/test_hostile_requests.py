"""Malformed requests to all HTTP servers: ports 10249, 10256 and healthCheckNodePorts.

They cost neither memory nor threads, and no line of the log. `make fuzz` sends 100,000 of them.
"""

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.http.http_client import ask

_SERVERS = """
import os, socket, sys, time
from ebpfproxy import log
from ebpfproxy.config.load import load
from ebpfproxy.http import zpages
from ebpfproxy.http.health_check_node_port import ServiceHealthServer
from ebpfproxy.http.healthz import HealthPages, HealthServer, ProxierHealth
from ebpfproxy.http.metrics import Metrics, MetricsServer
from ebpfproxy.model.address import parse_address
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.health_check_node_port import HealthCheck
log.set_up(2, "text")
log.capture()
metrics, loaded, any_port = Metrics(), load({}), ("127.0.0.1", 0)
listeners = (
    MetricsServer(any_port, metrics, lambda: "ebpf", page=lambda request: zpages.page(request, loaded)),
    HealthServer(any_port, HealthPages(ProxierHealth(30.0), metrics)),
)
for each in listeners:
    each.start()
checks = ServiceHealthServer(lambda: True)
checks.start()
with socket.create_server(any_port) as held:
    port = held.getsockname()[1]
checks.update([HealthCheck(NamespacedName("shop", "web"), port, 1)], [parse_address("127.0.0.1")])
print(*(each.port for each in listeners), port, flush=True)
sys.stdin.read()
"""
_CLIENTS = 8
_PATHS = [
    "/",
    "/healthz",
    "/livez",
    "/readyz?verbose",
    "/metrics",
    "/flagz",
    "/configz",
    "/statusz",
    "/proxyMode",
]
_METHODS = ["GET", "HEAD", "POST", "PUT", "OPTIONS", "CONNECT", "PRI", "get", "", "G" * 300, "\xff"]
_VERSIONS = [
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/0.9",
    "HTTP/2.0",
    "HTTP/9.9",
    "HTTP/1",
    "HTTP/-1.1",
    "HTTP/1.1.1",
    "HTTP",
    "",
]
_VERSIONS += ["HTTP/" + "1" * 5000 + ".1", "HTTP/\u0661.1", "http/1.1", "HTTP/1.1 HTTP/1.1"]
_TARGETS = [
    *_PATHS,
    "*",
    "",
    "//",
    "http://[",
    "http://[::1",
    "http://a:b/",
    "http://a/%",
    "/%zz%00",
    "/../..",
    "?",
    "#",
]
_TARGETS += [
    "/metrics?" + "name[]=a&" * 500,
    "/readyz?exclude=" + "%41" * 2000,
    "/" + "a/" * 4000,
    "/\x00",
    "/\xe9",
    "/a b",
]
_HEADERS = [
    *("Host: a", "Connection: keep-alive", "Connection: close", "Connection: Upgrade", "Upgrade: h2c"),
    *("Content-Length: 5", "Content-Length: -1", "Content-Length: " + "9" * 400, "Content-Length: x"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Expect: 100-continue", "Expect: x"),
    *(
        "Accept: " + "a/b;q=9," * 800,
        "Accept: application/openmetrics-text",
        "Accept: \xff",
        "Accept-Encoding: gzip",
    ),
    *(
        "no colon",
        ": no name",
        " folded",
        "\tfolded",
        "a" * 8000,
        "a: " + "b" * 15000,
        "\x00: \x00",
        "a:\x0bb\rc",
        "é: é",
    ),
]
_ENDS = [b"\r\n", b"\n", b"\r", b"\r\r\n", b"", b"\x00\r\n"]
_OTHER = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(60),
    bytes.fromhex("16030100c8010000c4030300") + bytes(200),  # TLS ClientHello
    b"\r\n" * 3000,
    b"GET /\r\n",
    b"a" * 200_000,
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 30_000,
    b"GET / HTTP/1.1\r\n" + (b"a: " + b"b" * 60_000 + b"\r\n") * 90 + b"\r\n",
    b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"ffffffffffffffff\r\n" + b"x" * 100_000,
]


class Servers(NamedTuple):
    """A process with all servers."""

    process: "subprocess.Popen[str]"
    ports: list[int]
    lines: list[str]

    def kilobytes(self, field: str = "VmRSS") -> int:
        """A size in /proc/PID/status."""
        return int(self.status(field).split()[0])

    def threads(self) -> int:
        return int(self.status("Threads"))

    def status(self, field: str) -> str:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(line.partition(":")[2] for line in text.splitlines() if line.startswith(f"{field}:"))


@pytest.fixture
def servers() -> Iterator[Servers]:
    command = [sys.executable, "-c", _SERVERS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        assert process.stderr
        made = Servers(process, [int(port) for port in process.stdout.readline().split()], [])
        reader = threading.Thread(target=made.lines.extend, args=(process.stderr,))
        reader.start()
        try:
            yield made
        finally:
            process.kill()
            reader.join()


def request(draw: random.Random) -> bytes:
    """One or more requests, most of them malformed."""
    if draw.random() < 0.05:
        return draw.choice(_OTHER)
    if draw.random() < 0.1:
        return draw.randbytes(draw.randrange(2000))
    words = [draw.choice(_METHODS if draw.random() < 0.3 else ["GET"]), draw.choice(_TARGETS)]
    words.append(draw.choice(_VERSIONS if draw.random() < 0.5 else ["HTTP/1.1"]))
    lines = [draw.choice([" ", " ", " ", "  ", "\t", ""]).join(words)]
    lines += draw.choices(_HEADERS, k=draw.choice([0, 1, 2, 5, 120]))
    end = draw.choice(_ENDS if draw.random() < 0.2 else [b"\r\n"])
    text = b"".join(
        line.encode("utf-8" if draw.random() < 0.5 else "latin-1", "replace") + end for line in lines
    )
    text = (text + end) * draw.choice([1, 1, 1, 2, 20])
    for _ in range(draw.choice([0, 0, 1, 5])):
        at = draw.randrange(len(text) + 1)
        text = draw.choice([text[:at], text[at:], text[:at] + draw.randbytes(3) + text[at + 3 :]])
    return text


def send(draw: random.Random, port: int) -> None:
    """Send a request from an address of the client's own, and end the connection in some way."""
    with socket.socket() as client, contextlib.suppress(OSError):
        client.settimeout(0.05)
        client.bind((f"127.0.1.{draw.randrange(1, 255)}", 0))
        client.connect(("127.0.0.1", port))
        client.sendall(request(draw))
        way = draw.randrange(4)
        if way == 0:
            client.shutdown(socket.SHUT_WR)
        if way == 1:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset
        if way in (0, 2):
            while client.recv(65536):
                pass


def flood(ports: list[int], count: int, seed: int) -> None:
    """Send this number of requests, from several threads."""

    def run(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        for _ in range(count // _CLIENTS):
            send(draw, draw.choice(ports))

    clients = [threading.Thread(target=run, args=(number,)) for number in range(_CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()


def wait_for(what: Callable[[], bool]) -> bool:
    """Whether it is true before connections that wait for the rest of a request have ended."""
    deadline = time.monotonic() + 90
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_malformed_requests_cost_neither_memory_nor_lines_of_the_log(
    servers: Servers, pytestconfig: pytest.Config
) -> None:
    count, seed = pytestconfig.getoption("requests"), int.from_bytes(os.urandom(4))
    print(f"seed {seed}")  # pytest shows it after a failure
    threads, lines = servers.threads(), len(servers.lines)
    flood(servers.ports, count // 10, seed)  # so that buffers have their size
    before = servers.kilobytes()
    began = time.monotonic()
    flood(servers.ports, count, seed + 1)
    took = time.monotonic() - began
    for port, path in zip(servers.ports, ("/healthz", "/livez", "/"), strict=True):
        assert ask(port, path).code == 200
    assert wait_for(lambda: servers.threads() <= threads), "a thread of a connection is left"
    assert servers.kilobytes() - before < 8_000, f"{count} requests took memory"
    assert servers.kilobytes("VmHWM") - before < 64_000
    assert len(servers.lines) - lines <= took + 1, servers.lines
