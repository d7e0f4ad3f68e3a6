"""Commands of ebpfproxy in processes that have imported it already.

A server process, one for each worker, imports all modules and forks for each command. The command runs as
`python -P -m ebpfproxy` would run it, except that /proc/PID/cmdline is the server's. That
saves a fifth of the CPU time of tests with agents.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import ebpfproxy
from ebpfproxy.lab.agent import PROGRAM, Agent
from ebpfproxy.lab.netns import Netns, Process
from ebpfproxy.linux.child import python
from ebpfproxy.linux.netns import netns

_ordinary = Agent.popen
_MOST = 1 << 20  # bytes of a request
_STATUS = struct.Struct("=i")
_PATIENCE = 60.0  # seconds for an answer of the server
_EXCLUDED = (
    "ebpfproxy.bench",
    "ebpfproxy.__main__",
    "ebpfproxy.cli.otlp",  # it needs an optional package
    "ebpfproxy.http.zpages",  # it notes the time of its import
)


class Forked:
    """A running command. It has the methods of subprocess.Popen that tests use."""

    def __init__(self, pid: int, pidfd: int, ended: int) -> None:
        """`ended`: a pipe from which the exit status can be read at the end."""
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: IO[bytes] | None = None
        self._pidfd = pidfd
        self._ended = ended

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready = select.poll()
            ready.register(self._ended, select.POLLIN)
            if not ready.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("ebpfproxy", timeout or 0.0)
            (self.returncode,) = _STATUS.unpack(os.read(self._ended, _STATUS.size))
            os.close(self._ended)
            os.close(self._pidfd)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The server process. It ends with the process that started it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        self._socket.settimeout(_PATIENCE)
        self._lock = threading.Lock()

    def start(self, node: Netns, command: Sequence[str], out: int, error: int) -> Forked:
        """Start a command in the namespace and cgroup of the node, without input. It begins with "ebpfproxy"
        or the path of a Python file. `out` and `error`: file descriptors for its output; they stay open."""
        request = {
            "command": [str(each) for each in command],
            "cgroup": str(node.cgroup / "cgroup.procs"),
            "netns": str(node.netns),
            "folder": str(Path.cwd()),
            "environment": dict(os.environ),
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        ended, end = os.pipe()
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [out, error, end])
            raw, (pidfd,), _, _ = socket.recv_fds(self._socket, _STATUS.size, 1)
        os.close(end)
        return Forked(_STATUS.unpack(raw)[0], pidfd, ended)

    def close(self) -> None:
        """Children of this process may still hold the socket."""
        self._process.kill()
        self._process.wait()


@functools.cache
def _server(owner: int) -> Server:
    """That of the process `owner`: a forked child does not share it."""
    server = Server()
    atexit.register(server.close)
    return server


def start(node: Netns, command: Sequence[str], out: int) -> None:
    """Start a command with this standard output. It is killed when the lab ends."""
    node.adopt(_server(os.getpid()).start(node, command, out, 2))


def popen(namespace: Netns, command: Sequence[str]) -> Process:
    """For `Agent.popen`. Any other program than this installation is started as usual."""
    if tuple(command[: len(PROGRAM)]) != PROGRAM:
        return _ordinary(namespace, command)
    reading, writing = os.pipe()
    arguments = command[len(PROGRAM) - 1 :]
    with open(os.devnull, "wb") as devnull:
        child = _server(os.getpid()).start(namespace, ["ebpfproxy", *arguments], devnull.fileno(), writing)
    os.close(writing)
    child.stderr = os.fdopen(reading, "rb")
    namespace.adopt(child)
    return child


def run(
    node: Netns, arguments: Sequence[str], *, timeout: float, check: bool
) -> "subprocess.CompletedProcess[str]":
    """As `Netns.run` does."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        child = _server(os.getpid()).start(node, ["ebpfproxy", *arguments], out.fileno(), error.fileno())
        try:
            status = child.wait(timeout)
        finally:
            child.kill()
        texts = []
        for file in (out, error):
            file.seek(0)
            texts.append(file.read().decode())
    done = subprocess.CompletedProcess(["ebpfproxy", *arguments], status, *texts)
    if check and status:
        failure = subprocess.CalledProcessError(status, done.args, *texts)
        failure.add_note(texts[1])
        raise failure
    return done


# In the server


def _import_everything() -> None:
    for module in pkgutil.walk_packages(ebpfproxy.__path__, "ebpfproxy."):
        if not module.name.startswith(_EXCLUDED):
            importlib.import_module(module.name)
    gc.freeze()


def _serve(control: socket.socket) -> list[str]:
    """Fork for each request. In a child, return the command; in the server, end with the socket."""
    ends: dict[int, int] = {}  # by the pidfd of a child: where to write its status
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                if _has_reported(ready, ends[ready]):
                    poll.unregister(ready)
                    os.close(ready)
                    os.close(ends.pop(ready))
                continue
            raw, descriptors, _, _ = socket.recv_fds(control, _MOST, 3)
            if not raw:
                os._exit(0)
            *output, end = descriptors
            pid = os.fork()
            if not pid:
                return _become(json.loads(raw), *output)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(control, [_STATUS.pack(pid)], [pidfd])
            poll.register(pidfd, select.POLLIN)
            ends[pidfd] = end
            for each in output:
                os.close(each)


def _has_reported(pidfd: int, end: int) -> bool:
    """Write the exit status. False if the process runs: execve(2) by a thread can make its pidfd readable."""
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    if not result:
        return False
    status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
    os.write(end, _STATUS.pack(status))
    return True


def _become(request: dict[str, Any], out: int, error: int) -> list[str]:
    """Make this process what `Netns.popen` would start."""
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    Path(request["cgroup"]).write_text("0")
    with open(request["netns"]) as namespace:
        netns.enter(namespace.fileno())
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    return list(request["command"])


def main() -> None:
    _import_everything()
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until a child has its own mask
    sys.argv = _serve(control)
    control.detach()
    if sys.argv[0] != "ebpfproxy":
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    sys.orig_argv = python("-m", *sys.argv)
    runpy.run_module("ebpfproxy", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
