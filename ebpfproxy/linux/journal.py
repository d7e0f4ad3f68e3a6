"""The log of a systemd unit: journalctl(1)."""

import shutil
import subprocess

from ebpfproxy.errors import NotFound, Rejected

_TIMEOUT = 30.0  # seconds


def read(unit: str, lines: int) -> str:
    """Return the last lines of a unit's journal, "" if it has none.

    Raises NotFound without journalctl, Rejected if it fails.
    """
    path = shutil.which("journalctl")
    if not path:
        raise NotFound("cannot read the journal: there is no journalctl")
    command = [path, f"--unit={unit}", f"--lines={lines}", "--no-pager", "--quiet", "--output=short-iso"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False, errors="replace"
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Rejected(f"cannot read the journal: {error}") from error
    if done.returncode:
        raise Rejected(f"cannot read the journal: {' '.join(done.stderr.split()) or 'journalctl failed'}")
    return done.stdout
