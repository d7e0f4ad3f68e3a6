"""The load generator: compiles the C program in c/ and runs it as servers and clients."""

import array
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ebpfproxy.errors import ConfigError, EbpfProxyError
from ebpfproxy.lab import Netns

Target = tuple[str, int]

_CHUNK = 16384  # bytes that a download reads at once

_SOURCES = sorted(Path(__file__).with_name("c").glob("*.c"))
_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")


def one_cpu() -> int:
    """Return the CPU on which clients and servers run if they share one.

    With several CPUs, the scheduler decides in each turn whether a client and its server share one, and
    the duration of the same connection differs by a factor of up to 3. Other work of the machine
    prefers the first CPU, therefore this is the last one.
    """
    return max(os.sched_getaffinity(0))


class LoadFailed(EbpfProxyError):
    """A connection that must succeed failed, or a client crashed."""


@functools.cache
def _compiled() -> bytes:
    """The program, which takes about half a second to compile. Raises ConfigError without a C compiler."""
    with tempfile.TemporaryDirectory(prefix="ebpfproxy-load-") as folder:
        binary = Path(folder, "load")
        try:
            done = subprocess.run(
                ["cc", *_FLAGS, "-o", binary, *_SOURCES], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise ConfigError(
                "cannot find the C compiler cc", "install it: apt-get install gcc libc6-dev"
            ) from None
        if done.returncode:
            raise ConfigError(
                f"cannot compile {_SOURCES[0].parent}: {done.stderr.strip()}",
                "install the C headers: apt-get install libc6-dev",
            )
        return binary.read_bytes()


def megabits(megabytes: int, nanoseconds: float) -> float:
    """Return the Mbit/s (10^6 bits) of a stream of so many MiB.

    >>> megabits(1, 8388608.0)
    1000.0
    """
    return (megabytes << 23) * 1e3 / nanoseconds


class Load:
    """The compiled program, in the lab's folder."""

    def __init__(self, folder: Path, cpu: int | None = None) -> None:
        """Raises ConfigError without a C compiler.

        With `cpu`, all clients and servers run on this CPU.
        """
        self._folder = folder
        self._binary = folder / "load"
        on_cpu = () if cpu is None else ("taskset", "--cpu-list", str(cpu))
        self._command: tuple[str | Path, ...] = (*on_cpu, self._binary)
        self._binary.write_bytes(_compiled())
        self._binary.chmod(0o755)

    def serve(self, namespace: Netns, port: int) -> "subprocess.Popen[bytes]":
        """Answer TCP and UDP on a port of all addresses. Returns once the server is ready."""
        server = namespace.popen([*self._command, "serve", "-p", str(port)], stdout=subprocess.PIPE)
        assert server.stdout
        with server.stdout as line:
            if not line.readline():
                raise LoadFailed(f"no server on port {port} of {namespace.namespace}")
        return server

    def targets(self, name: str, *lists: Iterable[Target]) -> Path:
        """Write lists of targets for the methods below. Successive connections use the lists in turn."""
        path = self._folder / f"{name}.targets"
        texts = ("".join(f"{address} {port}\n" for address, port in targets) for targets in lists)
        path.write_text("-\n".join(texts))
        return path

    def measure(
        self,
        client: Netns,
        mode: str,
        targets: Path,
        samples: int,
        *,
        seconds: float = 0.0,
        seed: int = 0,
        connected: bool = False,
        megabytes: int = 0,
    ) -> "list[array.array[int]]":
        """Return nanoseconds for each list of targets, in order.

        They are durations of connections (mode connect, crr, rr, udp or udprr), of a datagram until it is
        dropped (packet; first: the first of a flow), or of a stream of so many `megabytes` (MiB) to the
        server (put) or from it (get). There are `samples` for all lists together, after a warm-up except for
        streams, and fewer if they take longer than `seconds`; 0: no limit. Raises LoadFailed at the first
        failure.
        """
        lists = 1 + sum(line == "-\n" for line in targets.open())
        # A multiple, so that samples begin with the first list.
        warm_up = 0 if megabytes else min(500, samples) // lists * lists
        flags = ["-n", str(samples), "-t", str(seconds), "-w", str(warm_up), "-s", str(seed)]
        flags += ["-b", str(megabytes << 20)]
        raw = self._run(client, [mode, *flags, *(["-c"] if connected else [])], targets)
        figures = array.array("Q", raw)
        return [figures[turn::lists] for turn in range(lists)]

    def churn(
        self,
        client: Netns,
        targets: Path,
        *,
        count: int = 0,
        seconds: float = 0.0,
        connect_only: bool = False,
    ) -> dict[str, Any]:
        """Open connections, continue after errors, and return a report.

        It has attempts, failed, seconds, slowest_us, errors by name, and `slow`: connections that took half a
        second or more, because they had to retransmit a packet.
        """
        flags = ["-n", str(count), "-t", str(seconds), *(["-c"] if connect_only else [])]
        return _report(self._run(client, ["churn", *flags], targets))

    def start_churn(
        self,
        client: Netns,
        targets: Path,
        *,
        count: int = 0,
        seconds: float = 0.0,
        rate: float = 0.0,
        seed: int = 0,
        connect_only: bool = False,
    ) -> "subprocess.Popen[bytes]":
        """Start a churn that runs until `end_churn`, or for `count` attempts, or for `seconds`.

        `rate` is the number of connections per second; 0: as many as possible.
        """
        flags = ["-n", str(count), "-t", str(seconds), "-r", str(rate), "-s", str(seed)]
        return self._start(client, ["churn", *flags, *(["-c"] if connect_only else [])], targets)

    def end_churn(
        self, running: "subprocess.Popen[bytes]", *, terminate: bool = True, timeout: float = 30.0
    ) -> dict[str, Any]:
        """Terminate a client, or wait for its end, and return its report as `churn` does.

        Raises LoadFailed if the client failed, subprocess.TimeoutExpired after `timeout` seconds.
        """
        if terminate:
            running.terminate()
        out, _ = running.communicate(timeout=timeout)
        if running.returncode:
            raise LoadFailed(f"a load client ended with status {running.returncode}")
        return _report(out)

    def hold(
        self, client: Netns, targets: Path, count: int, *, busy: float = 0.0
    ) -> tuple["subprocess.Popen[bytes]", dict[str, Any]]:
        """Open connections and hold them until `end_churn`, which has a last exchange on each.

        Returns once all are open, with a report as that of a churn. `busy` is the number of exchanges per
        second on all connections together, one after another; 0: none. Raises LoadFailed if the client ends.
        """
        flags = ["-n", str(count), *(["-c", "-r", str(busy)] if busy else [])]
        running = self._start(client, ["hold", *flags], targets)
        assert running.stdout
        return running, _report(running.stdout.readline())

    def start_download(self, client: Netns, targets: Path, megabytes: float) -> "subprocess.Popen[bytes]":
        """Start a download of so many MB of 10^6 bytes per second. It runs until `end_churn`.

        The client checks each byte, and that the server ended the stream. The report has `bytes`; its
        `slowest_us` is the longest wait for a chunk.
        """
        return self._start(client, ["download", "-r", str(megabytes * 1e6 / _CHUNK)], targets)

    def _start(self, client: Netns, arguments: Sequence[str], targets: Path) -> "subprocess.Popen[bytes]":
        with open(targets, "rb") as lines:
            return client.popen([*self._command, *arguments], stdin=lines, stdout=subprocess.PIPE)

    def _run(self, client: Netns, arguments: Sequence[str], targets: Path) -> bytes:
        with open(targets, "rb") as lines:
            process = client.popen(
                [*self._command, *arguments], stdin=lines, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            out, err = process.communicate()
        if process.returncode:
            raise LoadFailed(f"{client.namespace}: {err.decode().strip() or f'status {process.returncode}'}")
        return bytes(out)


def _report(out: bytes) -> dict[str, Any]:
    """Parse the report of a client, a JSON object. Raises LoadFailed for anything else."""
    try:
        report: dict[str, Any] = json.loads(out)
    except ValueError:
        raise LoadFailed(f"a load client reported {out[:80]!r}, which is not JSON") from None
    return report
