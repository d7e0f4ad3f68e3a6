"""Whether this machine can run VMs."""

import functools
import importlib.util
import os
import shutil

_PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "setpriv": "util-linux",
    "dpkg": "dpkg",
}
"""The command that installs Debian's packages."""


@functools.cache
def lacks() -> str:
    """Why the tests marked `vm` cannot run on this machine; "" if they can."""
    if os.geteuid() != 0:
        return "not root"
    if os.uname().machine != "x86_64":
        return f"kernels for {os.uname().machine} are not in tests/vm/kernels.toml"
    if importlib.util.find_spec("bcc") is None:
        return "no bcc: apt-get install python3-bpfcc, and .venv with --system-site-packages"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"no program {program}: apt-get install {package}"
    return ""
