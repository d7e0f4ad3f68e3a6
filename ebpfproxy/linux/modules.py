"""Kernel modules: loading them with the node's modprobe."""

from ebpfproxy.errors import KernelError, Rejected, Unsupported
from ebpfproxy.linux import tools

_HINT = "run it on the node: containers usually have no /lib/modules"


def load(name: str) -> None:
    """Load a module and those that it depends on. Does nothing if it is loaded or built in.

    Raises Unsupported if there is no modprobe or no such module, else KernelError.
    """
    action = f"cannot load the module {name}"
    try:
        done = tools.run(("modprobe", "--", name))
    except KernelError as failure:
        raise type(failure)(f"{action}: {failure.message}", _HINT) from failure
    if done.code:
        reason = (done.errors.strip().splitlines() or [f"exit status {done.code}"])[-1]
        kind = Unsupported if "not found" in reason else Rejected
        raise kind(f"{action}: {reason}", _HINT if kind is Unsupported else "run as root")
