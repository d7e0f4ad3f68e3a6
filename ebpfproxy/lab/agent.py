"""The agent as a process on a node of the lab, and its log lines."""

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from ebpfproxy.agent.sync_log import SYNCED
from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.lab.netns import Netns, Process
from ebpfproxy.linux.child import python

_WORD = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|\S+)')
_LAST_LINES = 20
PROGRAM = (*python("-m", "ebpfproxy"), "run")


class LogLine(NamedTuple):
    """A log line. `moment` is when it was read, in seconds of time.monotonic()."""

    moment: float
    text: str

    @property
    def values(self) -> dict[str, str]:
        """The key=value pairs.

        >>> LogLine(0.0, '2025-01-01T00:00:00.000Z INFO Synced services services=3 mode="a b"').values
        {'services': '3', 'mode': 'a b'}
        """
        pairs = _WORD.findall(self.text)
        return {key: json.loads(word) if word.startswith('"') else word for key, word in pairs}


class AgentFailed(EbpfProxyError):
    """The agent ended, or did not log an expected line in time. The hint is its last log lines."""

    def __init__(self, message: str, lines: Sequence[LogLine]) -> None:
        super().__init__(message, "\n".join(line.text for line in lines[-_LAST_LINES:]))
        self.add_note("\n".join(line.text for line in lines))


class Popen(Protocol):
    """Starts a command in a namespace, with its standard error as a pipe."""

    def __call__(self, namespace: Netns, command: Sequence[str]) -> Process: ...


def _popen(namespace: Netns, command: Sequence[str]) -> Process:
    return namespace.popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


class Agent:
    """The process of `ebpfproxy run` on a node. `started` is its start, in seconds of time.monotonic().

    `program` is the command that runs the agent; the default is this installation.
    """

    popen: ClassVar[Popen] = staticmethod(_popen)
    """Starts the command. Tests replace it."""

    def __init__(self, namespace: Netns, flags: Sequence[str], program: Sequence[str] = PROGRAM) -> None:
        self.lines: list[LogLine] = []
        self._changed = threading.Condition()
        self._open = True
        self.started = time.monotonic()
        self.process = self.popen(namespace, [*program, *flags])
        # Only the main thread receives signals, so that it can block them while it cleans up.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        threading.Thread(target=self._read, name="agent-log", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def log(self) -> str:
        """Return all lines logged so far."""
        return "\n".join(line.text for line in self.lines)

    def await_line(self, wanted: Callable[[LogLine], bool], since: int = 0, timeout: float = 30.0) -> LogLine:
        """Return the first line, from index `since` in `lines`, for which `wanted` is true. Wait for it.

        Raises AgentFailed if the agent ends, or after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for line in self.lines[since:]:
                    if wanted(line):
                        return line
                since = len(self.lines)
                if not self._open:
                    raise AgentFailed(f"the agent ended with status {self.process.wait()}", self.lines)
                if not self._changed.wait(deadline - time.monotonic()):
                    raise AgentFailed(f"the agent did not log the expected line in {timeout} s", self.lines)

    def await_sync(self, since: int = 0, timeout: float = 30.0) -> LogLine:
        """Return the first line about a completed sync, from index `since`. Wait as `await_line` does."""
        return self.await_line(is_sync, since, timeout)

    def stop(self, timeout: float = 10.0) -> int:
        """Send SIGTERM and return the exit status. Raises subprocess.TimeoutExpired."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """Send SIGKILL, which has the effect of a crash."""
        self.process.kill()
        self.process.wait()

    def rss_mb(self) -> float:
        """Return the resident memory, in MB of 10^6 bytes."""
        return memory_mb(self.process.pid, "VmRSS")

    def peak_rss_mb(self) -> float:
        """Return the peak of the resident memory, in MB of 10^6 bytes."""
        return memory_mb(self.process.pid, "VmHWM")

    def _read(self) -> None:
        assert self.process.stderr
        with self.process.stderr as stream:
            for raw in stream:
                line = LogLine(time.monotonic(), raw.decode(errors="replace").rstrip("\n"))
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._open = False
            self._changed.notify_all()


def memory_mb(pid: int, field: str) -> float:
    """Return a field of /proc/PID/status, such as VmRSS, in MB of 10^6 bytes. Raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = re.findall(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024 / 1e6


def is_sync(line: LogLine) -> bool:
    """Whether the message of the line is SYNCED.

    >>> is_sync(LogLine(0.0, "2025-01-01T00:00:00.000Z INFO Synced services services=3 latency_ms=2"))
    True
    >>> is_sync(LogLine(0.0, "2025-01-01T00:00:00.000Z INFO Listening synced=no"))
    False
    """
    return f" INFO {SYNCED} " in line.text
