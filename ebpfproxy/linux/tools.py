"""Runs tools of the node until they end, in the network namespace of the thread: iptables(8) and others."""

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from ebpfproxy.errors import KernelError, Rejected, Unsupported

TIMEOUT = 300.0
"""Seconds after which a tool is killed. With 10 000 Services, iptables-nft can take half a minute."""

FOLDERS = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
"""Where tools are searched: those of root are not in the PATH of every service."""

_NOT_EXECUTABLE = frozenset({errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.EPERM})


class Done(NamedTuple):
    """`code`: the exit status; negative: the number of the signal that killed the tool."""

    code: int
    output: str
    errors: str

    @property
    def killed_by(self) -> str:
        """The name of that signal, "" if the tool ended by itself."""
        return signal.Signals(-self.code).name if self.code < 0 else ""


def find(name: str) -> str | None:
    """The path of a tool; None if it is missing."""
    return shutil.which(name, path=FOLDERS)


def run(command: Sequence[str], text: str = "") -> Done:
    """Run a tool with `text` as its standard input. Bytes that are not UTF-8 are preserved.

    Standard input is a file in memory. iptables-legacy sets an alarm while it waits for the lock and does not
    cancel it afterwards (xtables_lock() of 1.8.9). The alarm would interrupt reading a long text from a pipe.
    Raises KernelError if it takes too long, Unsupported or Rejected if it cannot be started.
    """
    try:
        with open(os.memfd_create("input"), "w+b") as script:
            script.write(text.encode(errors="surrogateescape"))
            script.seek(0)
            done = subprocess.run(
                command,
                stdin=script,
                capture_output=True,
                timeout=TIMEOUT,
                env=os.environ | {"LC_ALL": "C"},
                process_group=0,  # Ctrl-C must not end a tool while it changes the kernel
                check=False,
            )
    except subprocess.TimeoutExpired as failure:
        raise KernelError(f"{command[0]} timed out after {TIMEOUT:.0f} s and was killed") from failure
    except OSError as failure:
        kind = Unsupported if failure.errno in _NOT_EXECUTABLE else Rejected
        raise kind(f"cannot start {command[0]}: {failure.strerror}") from failure
    return Done(done.returncode, _decoded(done.stdout), _decoded(done.stderr))


def _decoded(output: bytes) -> str:
    return output.decode(errors="surrogateescape")
