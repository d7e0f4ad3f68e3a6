"""Kernel modules: loading them with the node's modprobe."""

import errno
import subprocess

from ebpfproxy.errors import KernelError, Rejected, Unsupported

_TIMEOUT_S = 60.0
_HINT = "run it on the node: containers usually have no /lib/modules"


def load(name: str) -> None:
    """Load a module and those that it depends on. Does nothing if it is loaded or built in.

    Raises Unsupported if there is no modprobe or no such module, else KernelError.
    """
    action = f"cannot load the module {name}"
    try:
        done = subprocess.run(
            ("modprobe", "--", name), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as failure:
        raise KernelError(f"{action}: modprobe timed out after {_TIMEOUT_S:.0f} s") from failure
    except OSError as failure:
        kind = Unsupported if failure.errno == errno.ENOENT else Rejected
        raise kind(f"{action}: cannot start modprobe: {failure.strerror}", _HINT) from failure
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        kind = Unsupported if "not found" in reason else Rejected
        raise kind(f"{action}: {reason}", _HINT if kind is Unsupported else "run as root")
