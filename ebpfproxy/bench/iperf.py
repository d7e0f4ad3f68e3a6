"""Measurements with iperf3: the throughput of a TCP stream, and the rate of small datagrams that arrive."""

import json
import shutil
import subprocess
import time
from typing import Any

from ebpfproxy.bench.load import LoadFailed
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Netns

PORT = 5201
DATAGRAM = 64
"""Bytes of payload of a datagram."""

_TIMEOUT = 60.0
_ATTEMPTS = 3


def require() -> None:
    """Raise ConfigError if iperf3 is not installed."""
    if shutil.which("iperf3") is None:
        raise ConfigError("cannot find iperf3", "install it: apt-get install iperf3")


def serve(server: Netns) -> None:
    """Serve on PORT of all addresses, one test at a time. Returns once the server listens."""
    server.popen(["iperf3", "-s", "-p", str(PORT)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + _TIMEOUT
    while ":1451 " not in server.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout:
        if time.monotonic() > deadline:
            raise LoadFailed(f"{server.namespace}: iperf3 does not listen on port {PORT}")
        time.sleep(0.02)


def megabits(
    client: Netns,
    address: str,
    megabytes: int,
    port: int = PORT,
    *,
    download: bool = False,
    cpu: int | None = None,
) -> float:
    """Return Mbit/s of a TCP stream of so many MiB, as counted by the receiver. Raises LoadFailed.

    The client sends, or with `download` the server. With `cpu`, both run on this CPU.
    """
    affinity = [] if cpu is None else ["-A", f"{cpu},{cpu}"]
    direction = ["-R"] if download else []
    return received_megabits(_run(client, address, port, ["-n", f"{megabytes}M", *direction, *affinity]))


def datagrams(client: Netns, address: str, count: int, port: int = PORT) -> float:
    """Return the received datagrams per second. One sender sends `count`, each of DATAGRAM bytes, unpaced.

    Raises LoadFailed.
    """
    size = str(DATAGRAM)
    return arrived(_run(client, address, port, ["-u", "-l", size, "-b", "0", "-n", str(count * DATAGRAM)]))


def received_megabits(report: dict[str, Any]) -> float:
    """Return the receiver's Mbit/s in a report of iperf3."""
    return float(report["end"]["sum_received"]["bits_per_second"]) / 1e6


def arrived(report: dict[str, Any]) -> float:
    """Return the received datagrams per second in a report of iperf3."""
    total = report["end"]["sum"]
    return float((total["packets"] - total["lost_packets"]) / total["seconds"])


def _run(client: Netns, address: str, port: int, flags: list[str]) -> dict[str, Any]:
    """Run a test and return its report. Retries if the server is not ready for the next test yet.

    `flags` limit the amount, not the time, because iperf3 only has whole seconds.
    """
    command = ["iperf3", "-J", "-c", address, "-p", str(port), *flags]
    reason = ""
    for _ in range(_ATTEMPTS):
        done = client.run(command, timeout=_TIMEOUT, check=False)
        report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr.strip()}
        if "error" not in report:
            return report
        reason = report["error"]
        time.sleep(0.2)
    raise LoadFailed(f"{client.namespace}: iperf3 to {address} port {port}: {reason}")
