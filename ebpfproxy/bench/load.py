"""The C program in c/: compiled, run as a server, and run as clients whose samples are read."""

import array
import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ebpfproxy.errors import ConfigError, EbpfProxyError
from ebpfproxy.lab import Netns

Target = tuple[str, int]

_PIECE = 16384  # bytes that a download reads at once

_SOURCES = sorted(Path(__file__).with_name("c").glob("*.c"))
_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")


class LoadFailed(EbpfProxyError):
    """A connection of a load that has to go through failed."""


class Load:
    """The program, compiled into a folder that is there for as long as the lab."""

    def __init__(self, folder: Path) -> None:
        """Compile it, in about half a second. Raises ConfigError without a C compiler."""
        self._folder = folder
        self._binary = folder / "load"
        try:
            done = subprocess.run(
                ["cc", *_FLAGS, "-o", self._binary, *_SOURCES], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise ConfigError("there is no C compiler", "apt-get install gcc libc6-dev") from None
        if done.returncode:
            raise ConfigError(
                f"{_SOURCES[0].parent} does not compile: {done.stderr.strip()}", "apt-get install libc6-dev"
            )

    def serve(self, place: Netns, port: int) -> "subprocess.Popen[bytes]":
        """Answer TCP and UDP on a port of all addresses of the place. Returns once it answers."""
        server = place.popen([self._binary, "serve", "-p", str(port)], stdout=subprocess.PIPE)
        assert server.stdout
        with server.stdout as line:
            if not line.readline():
                raise LoadFailed(f"no server on port {port} of {place.namespace}")
        return server

    def targets(self, name: str, *lists: Iterable[Target]) -> Path:
        """Write lists of targets, for the methods below; connections take turns among the lists."""
        path = self._folder / f"{name}.targets"
        texts = ("".join(f"{address} {port}\n" for address, port in targets) for targets in lists)
        path.write_text("-\n".join(texts))
        return path

    def measure(
        self, place: Netns, mode: str, targets: Path, samples: int, *, seed: int = 0, connected: bool = False
    ) -> "list[array.array[int]]":
        """For each list of targets, in order, the nanoseconds of its connections (connect, crr, rr or udp),
        or of the way of a datagram to where it is dropped (packet, or first: of a flow).

        There are `samples` of them altogether, after a warm-up. Raises LoadFailed at the first that fails.
        """
        lists = 1 + sum(line == "-\n" for line in targets.open())
        warm_up = min(500, samples) // lists * lists  # so that the first sample counted is the first list's
        flags = ["-n", str(samples), "-w", str(warm_up), "-s", str(seed)]
        raw = self._run(place, [mode, *flags, *(["-c"] if connected else [])], targets)
        figures = array.array("Q", raw)
        return [figures[turn::lists] for turn in range(lists)]

    def churn(
        self, place: Netns, targets: Path, *, count: int = 0, seconds: float = 0.0, connect_only: bool = False
    ) -> dict[str, Any]:
        """Connections that no error stops: attempts, failed, seconds, slowest_us, errors by their names.

        `slow` is how many took half a second or more: those that had to send a packet twice.
        """
        flags = ["-n", str(count), "-t", str(seconds), *(["-c"] if connect_only else [])]
        return _report(self._run(place, ["churn", *flags], targets))

    def start_churn(
        self,
        place: Netns,
        targets: Path,
        *,
        count: int = 0,
        seconds: float = 0.0,
        rate: float = 0.0,
        seed: int = 0,
        connect_only: bool = False,
    ) -> "subprocess.Popen[bytes]":
        """A churn that continues until `end_churn`, or until there were `count` attempts, or for `seconds`.

        `rate` is how many begin each second; 0: as many as go.
        """
        flags = ["-n", str(count), "-t", str(seconds), "-r", str(rate), "-s", str(seed)]
        return self._start(place, ["churn", *flags, *(["-c"] if connect_only else [])], targets)

    def end_churn(
        self, running: "subprocess.Popen[bytes]", *, terminate: bool = True, timeout: float = 30.0
    ) -> dict[str, Any]:
        """End it, or await its end, and return what `churn` does.

        Raises LoadFailed where it ended otherwise by itself, subprocess.TimeoutExpired after `timeout` s.
        """
        if terminate:
            running.terminate()
        out, _ = running.communicate(timeout=timeout)
        if running.returncode:
            raise LoadFailed(f"a load client ended with status {running.returncode}")
        return _report(out)

    def hold(
        self, place: Netns, targets: Path, count: int, *, busy: float = 0.0
    ) -> tuple["subprocess.Popen[bytes]", dict[str, Any]]:
        """Open connections that stay until `end_churn`, which asks each of them once more.

        Returns once all are open, with a report as that of a churn. `busy`: how many exchanges they
        have each second meanwhile, one after another; 0: none. Raises LoadFailed where it ended.
        """
        flags = ["-n", str(count), *(["-c", "-r", str(busy)] if busy else [])]
        running = self._start(place, ["hold", *flags], targets)
        assert running.stdout
        return running, _report(running.stdout.readline())

    def start_download(self, place: Netns, targets: Path, megabytes: float) -> "subprocess.Popen[bytes]":
        """One stream, of so many MB of 10^6 bytes a second, until `end_churn`. Each byte is looked at, and
        its end has to be the server's. Its report has `bytes`; `slowest_us` is the longest wait for a piece.
        """
        return self._start(place, ["download", "-r", str(megabytes * 1e6 / _PIECE)], targets)

    def _start(self, place: Netns, arguments: Sequence[str], targets: Path) -> "subprocess.Popen[bytes]":
        with open(targets, "rb") as lines:
            return place.popen([self._binary, *arguments], stdin=lines, stdout=subprocess.PIPE)

    def _run(self, place: Netns, arguments: Sequence[str], targets: Path) -> bytes:
        with open(targets, "rb") as lines:
            client = place.popen(
                [self._binary, *arguments], stdin=lines, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            out, err = client.communicate()
        if client.returncode:
            raise LoadFailed(f"{place.namespace}: {err.decode().strip() or f'status {client.returncode}'}")
        return bytes(out)


def _report(out: bytes) -> dict[str, Any]:
    """The one JSON object of a churn. Raises LoadFailed for anything else."""
    try:
        report: dict[str, Any] = json.loads(out)
    except ValueError:
        raise LoadFailed(f"a load client reported {out[:80]!r}, which is no JSON") from None
    return report
