"""iperf3: throughput of one TCP stream, and how many small datagrams arrive."""

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
"""Bytes of payload."""

_PATIENCE = 60.0
_ATTEMPTS = 3


def require() -> None:
    """Raises ConfigError where there is no iperf3."""
    if shutil.which("iperf3") is None:
        raise ConfigError("there is no iperf3", "apt-get install iperf3")


def serve(place: Netns) -> None:
    """Serve on PORT of all addresses, one test at a time. Returns once it answers."""
    place.popen(["iperf3", "-s", "-p", str(PORT)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + _PATIENCE
    while ":1451 " not in place.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout:
        if time.monotonic() > deadline:
            raise LoadFailed(f"{place.namespace}: iperf3 does not listen on port {PORT}")
        time.sleep(0.02)


def megabits(place: Netns, address: str, megabytes: int, port: int = PORT) -> float:
    """Mbit/s of one TCP stream of so many MiB from the place, as its receiver counts. Raises LoadFailed."""
    return received_megabits(_run(place, address, port, ["-n", f"{megabytes}M"]))


def datagrams(place: Netns, address: str, count: int, port: int = PORT) -> float:
    """Datagrams of DATAGRAM bytes a second that arrive, of `count` that one sender sends as fast as it can.

    Raises LoadFailed.
    """
    size = str(DATAGRAM)
    return arrived(_run(place, address, port, ["-u", "-l", size, "-b", "0", "-n", str(count * DATAGRAM)]))


def received_megabits(report: dict[str, Any]) -> float:
    return float(report["end"]["sum_received"]["bits_per_second"]) / 1e6


def arrived(report: dict[str, Any]) -> float:
    total = report["end"]["sum"]
    return float((total["packets"] - total["lost_packets"]) / total["seconds"])


def _run(place: Netns, address: str, port: int, flags: list[str]) -> dict[str, Any]:
    """By amount and not by time: iperf3 knows whole seconds only. Once more where the server is not ready
    for the next test yet."""
    command = ["iperf3", "-J", "-c", address, "-p", str(port), *flags]
    reason = ""
    for _ in range(_ATTEMPTS):
        done = place.run(command, timeout=_PATIENCE, check=False)
        report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr.strip()}
        if "error" not in report:
            return report
        reason = report["error"]
        time.sleep(0.2)
    raise LoadFailed(f"{place.namespace}: iperf3 to {address} port {port}: {reason}")
