"""Run commands and Python functions in a network namespace and a cgroup."""

import os
import pickle
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, Protocol, TypeVar

from ebpfproxy.linux.netns import netns

T = TypeVar("T")

_ENTER_CGROUP = ("/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"')
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Call(Generic[T]):
    """A function that runs in a forked child. `result` waits for its end."""

    def __init__(self, pid: int, outcome: int) -> None:
        self.pid = pid
        self._outcome = outcome
        self._reaped = False

    def result(self, timeout: float = 60.0) -> T:
        """Return the function's result, or raise its exception, with the child's traceback as a note.

        After `timeout` seconds, kill the child and raise TimeoutError. Call it only once.
        """
        raw = self._read(time.monotonic() + timeout)
        status = self._reap()
        if not raw:
            raise ChildProcessError(f"process {self.pid} ended without a result, with status {status}")
        ok, value = pickle.loads(raw)
        if ok:
            return value  # type: ignore[no-any-return]
        raise value

    def kill(self) -> None:
        """Kill the child with SIGKILL. Does nothing if it was reaped."""
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()

    def _read(self, deadline: float) -> bytes:
        poll, raw = select.poll(), b""
        poll.register(self._outcome, select.POLLIN)
        while True:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self.kill()
                raise TimeoutError(f"process {self.pid} did not end in time")
            chunk = os.read(self._outcome, 1 << 16)
            if not chunk:
                return raw
            raw += chunk

    def _reap(self) -> int:
        self._reaped = True
        os.close(self._outcome)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Process(Protocol):
    """A child process, such as subprocess.Popen."""

    pid: int
    stderr: IO[Any] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def kill(self) -> None: ...


class Netns:
    """A network namespace and a cgroup. `name` is the short name, without the lab's prefix."""

    def __init__(self, name: str, namespace: str, cgroup: Path) -> None:
        self.name = name
        self.namespace = namespace
        self.cgroup = cgroup
        self._children: list[Call[Any] | Process] = []

    @property
    def netns(self) -> Path:
        """The path of the network namespace: /run/netns/..."""
        return netns.path(self.namespace)

    def popen(self, arguments: Sequence[str | Path], **options: Any) -> "subprocess.Popen[Any]":
        """Start a command in the namespace and cgroup.

        It gets its own process group, so that a Ctrl-C reaches only this process. `options` are those of
        subprocess.Popen. The command is killed when the lab ends.
        """
        with netns.entered(self.netns):
            child = subprocess.Popen(self._in_cgroup(arguments), process_group=0, **options)
        self.adopt(child)
        return child

    def adopt(self, child: Process) -> None:
        """Kill this child, too, when the lab ends."""
        self._children.append(child)

    def run(
        self, arguments: Sequence[str | Path], *, timeout: float = 60.0, check: bool = True, stdin: str = ""
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in the namespace and cgroup to its end, and return its output.

        Raises subprocess.TimeoutExpired. With `check`, also raises subprocess.CalledProcessError, with the
        standard error as a note.
        """
        try:
            with netns.entered(self.netns):
                return subprocess.run(
                    self._in_cgroup(arguments),
                    process_group=0,
                    timeout=timeout,
                    check=check,
                    input=stdin,
                    capture_output=True,
                    text=True,
                )
        except subprocess.CalledProcessError as error:
            error.add_note(str(error.stderr))
            raise

    def start(self, function: Callable[[], T]) -> Call[T]:
        """Start a Python function in a forked child. It may be a closure; its result is pickled."""
        # Blocked during the fork: a Ctrl-C must not unwind the parent's stack in the child.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            reading, writing = os.pipe()
            pid = os.fork()
            if not pid:
                self._be_child(function, writing, mask)
            os.close(writing)
            call: Call[T] = Call(pid, reading)
            self._children.append(call)
            return call
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def start_until_ready(self, function: Callable[[int], T]) -> Call[T]:
        """Start a function as `start` does, and return once it has written to its file descriptor.

        Raises the function's exception if it fails before.
        """
        waiting, ready = os.pipe()

        def child() -> T:
            os.close(waiting)
            return function(ready)

        try:
            call = self.start(child)
        finally:
            os.close(ready)
        with open(waiting, "rb") as pipe:
            if not pipe.read(1):
                call.result()
        return call

    def call(self, function: Callable[[], T], timeout: float = 60.0) -> T:
        """Run a Python function in a forked child to its end: see `Call.result`."""
        return self.start(function).result(timeout)

    def reap(self) -> None:
        """Kill and reap all children."""
        for child in self._children:
            child.kill()
            if not isinstance(child, Call):
                child.wait()
        self._children.clear()

    def _in_cgroup(self, arguments: Sequence[str | Path]) -> list[str | Path]:
        """The command, preceded by a shell that enters the cgroup and is replaced by it.

        A function between fork and exec (preexec_fn) would copy the page tables of this process: in tests, 9
        ms of CPU time for each command.
        """
        return [*_ENTER_CGROUP, self.cgroup / "cgroup.procs", *arguments]

    def _move(self) -> None:
        """Enter the cgroup, then the namespace. A socket belongs to the cgroup of its creator."""
        (self.cgroup / "cgroup.procs").write_text("0")
        namespace = os.open(self.netns, os.O_RDONLY | os.O_CLOEXEC)
        netns.enter(namespace)
        os.close(namespace)

    def _be_child(
        self, function: Callable[[], object], writing: int, mask: set[int | signal.Signals]
    ) -> NoReturn:
        try:
            os.setpgid(0, 0)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._move()
            _write(writing, _outcome(function))
        finally:
            # Not sys.exit: the child must not run the parent's exit handlers or flush its buffers.
            os._exit(0)


def _outcome(function: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps((True, function()))
    except BaseException as error:
        # A note, because a traceback cannot be pickled.
        error.add_note("in the forked child:\n" + "".join(traceback.format_exception(error)))
        try:
            return pickle.dumps((False, error))
        except Exception:
            return pickle.dumps((False, RuntimeError("".join(traceback.format_exception(error)))))


def _write(descriptor: int, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        view = view[os.write(descriptor, view) :]
