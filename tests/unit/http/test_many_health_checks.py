"""Thousands of healthCheckNodePorts: their sockets leave descriptors for the rest of the agent."""

import json
import subprocess
import sys
from typing import Any

from ebpfproxy.http.health_check_node_port import CHECKS_LIMITED

_PROGRAM = """
import json, os, resource, sys, time
from ebpfproxy import log
from ebpfproxy.http.health_check_node_port import ServiceHealthServer
from ebpfproxy.linux import descriptors
from ebpfproxy.model.address import parse_address
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.health_check_node_port import HealthCheck
from tests.unit.http.http_client import ask

number, soft, hard = map(int, sys.argv[1:])
log.set_up(2, "text")
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if not hard:
    descriptors.raise_limit()
server = ServiceHealthServer(lambda: True)
server.start()
hosts = ["127.77.0.1", "127.77.0.2"]  # each Service takes two sockets, as with two families
services = [HealthCheck(NamespacedName("a", f"s{n}"), 30000 + n, 1) for n in range(number)]
server.update(services, map(parse_address, hosts))
wanted = min(2 * number, descriptors.limit() // 2)
while len(server._servers) < wanted:
    time.sleep(0.01)
free = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]

def answers(host, port):
    try:
        return ask(port, "/", host=host).code == 200
    except ConnectionRefusedError:
        return False

ends = [answers(host, 30000 + n) for host in hosts for n in (0, number - 1)]
print(json.dumps({"sockets": len(server._servers), "ends": ends}))
"""


def served(number: int, soft: int, hard: int = 0) -> tuple[dict[str, Any], str]:
    """What a process serves of that many Services with these limits of open files, and its log. Without
    `hard`, it may raise the limit."""
    command = [sys.executable, "-c", _PROGRAM, str(number), str(soft), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout), done.stderr


def test_2000_services_are_served_if_the_limit_can_be_raised() -> None:
    found, log = served(2000, 1024)
    assert found == {"sockets": 4000, "ends": [True] * 4}
    assert not log


def test_beyond_the_limit_half_of_the_descriptors_stay_free() -> None:
    found, log = served(300, 256, 256)
    assert found == {"sockets": 128, "ends": [True, False, False, False]}
    (line,) = log.splitlines()
    assert CHECKS_LIMITED in line
    assert "not_served=472 limit=256" in line
