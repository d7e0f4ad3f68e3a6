"""Types a command line with a Tab into a real shell, on a terminal of its own.

The program that the shell runs answers completions as `ebpfproxy` does. Otherwise it writes its arguments to
a file, so that a test reads what the shell made of the line, not what the terminal shows.
"""

import contextlib
import functools
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.kustomize import REPOSITORY

SHELLS: Mapping[str, tuple[Sequence[str], str]] = {
    "bash": (("bash", "--noprofile", "--norc", "-i"), "source {script}"),
    "zsh": (("zsh", "-f", "-i"), "autoload -U compinit; compinit -D -u; source {script}"),
    "fish": (("fish", "--no-config", "--private", "-i"), "source {script}"),
}
"""By name: the command that starts an interactive shell without configuration, and what it reads first."""
_PATIENCE = 20.0


class Shell:
    """An installation of the completion script. `folder` is empty and belongs to it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        programs = folder / "programs"
        programs.mkdir()
        self._arguments = folder / "arguments"
        program = programs / "ebpfproxy"
        program.write_text(
            "#!/bin/bash\n"
            f'[[ $_EBPFPROXY_COMPLETE ]] && PYTHONPATH={REPOSITORY} exec {sys.executable} -m ebpfproxy "$@"\n'
            f"printf '%s\\n' \"$@\" >{self._arguments}.new; mv {self._arguments}.new {self._arguments}\n"
        )
        program.chmod(0o755)
        self._path = f"{programs}:{os.environ['PATH']}"
        self.script = folder / "script"
        self.script.write_text(_script(name))

    def complete(self, line: str) -> list[str]:
        """Type `line`, Tab and Enter; return the arguments with which the shell ran `ebpfproxy`."""
        self._arguments.unlink(missing_ok=True)
        start, first = SHELLS[self.name]
        master, slave = pty.openpty()
        home = {"HOME": str(self.folder), "PATH": self._path, "TERM": "vt100", "LC_ALL": "C.UTF-8"}
        with subprocess.Popen(
            ["setsid", "--ctty", *start], stdin=slave, stdout=slave, stderr=slave, env=home, cwd=self.folder
        ) as shell:
            os.close(slave)
            shown: list[bytes] = []
            reader = threading.Thread(target=_read, args=(master, shown))
            reader.start()
            try:
                os.write(master, f"{first.format(script=self.script)}\n".encode())
                os.write(master, f"{line}\t\n".encode())
                deadline = time.monotonic() + _PATIENCE
                while not self._arguments.exists():
                    assert time.monotonic() < deadline, b"".join(shown).decode(errors="replace")
                    time.sleep(0.02)
            finally:
                shell.kill()
                shell.wait()
                reader.join()
                os.close(master)
        return self._arguments.read_text().splitlines()


@functools.cache
def _script(shell: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "ebpfproxy", "completion", shell],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def _read(terminal: int, shown: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the shell has ended
        while piece := os.read(terminal, 4096):
            shown.append(piece)
