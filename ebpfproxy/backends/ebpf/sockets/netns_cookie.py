"""The cookie of the agent's network namespace, which identifies the sockets of host processes."""

import contextlib
import sys
from pathlib import Path

from ebpfproxy.backends.ebpf import features
from ebpfproxy.backends.ebpf.hooks import CONNECT4
from ebpfproxy.errors import Rejected, Unsupported
from ebpfproxy.linux import mounts
from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.linux.bpf.bpf import Map, Program
from ebpfproxy.linux.netns import netns

_ARRAY = 2  # BPF_MAP_TYPE_ARRAY


def own(cgroup_root: Path | None) -> int:
    """The cookie of the calling thread's network namespace, as bpf_get_netns_cookie returns it, never 0.

    Before Linux 5.14 a process cannot read it. Then a program reads it, which runs for a child process in a
    temporary cgroup below `cgroup_root` (None: the root of cgroup v2). Raises KernelError.
    """
    try:
        return netns.cookie()
    except Unsupported:
        return read_by_program(cgroup_root or mounts.cgroup_root_of_all())


def read_by_program(cgroup_root: Path) -> int:
    """Like `own`, on every kernel with bpf_get_netns_cookie (5.7, f318903c0bf4). It takes 13 to 20 ms."""
    with contextlib.ExitStack() as stack:
        result = Map.create(_ARRAY, 4, 8, 1)
        stack.callback(result.close)
        code = features.stores_netns_cookie(result.fd)
        program = Program.load(CONNECT4.program_type, CONNECT4.attach_type, code)
        stack.callback(program.close)
        temporary = stack.enter_context(cgroup.temporary(cgroup_root))
        cgroup.attach_multi(program, temporary, CONNECT4.attach_type, None)
        cgroup.connect_in(temporary)
        cookie = int.from_bytes(result.lookup(bytes(4)) or b"", sys.byteorder)
    if not cookie:
        raise Rejected(
            f"cannot read the cookie of this network namespace: a program attached below {cgroup_root} did "
            "not run"
        )
    return cookie
