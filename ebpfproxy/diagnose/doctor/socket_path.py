"""The network namespaces of pods in mode ebpf: how many the socket path serves, and why not the others."""

import collections
from collections.abc import Iterator

from ebpfproxy.backends.ebpf.inspect import namespace_view
from ebpfproxy.config import Config
from ebpfproxy.diagnose.doctor.check import NODE, Check, State
from ebpfproxy.diagnose.doctor.links import Page
from ebpfproxy.errors import KernelError, NotFound

FEATURE = "pods on the socket path"


def checks(config: Config) -> Iterator[Check]:
    """Yield one row if mode ebpf has maps on this node, in the calling thread's network namespace."""
    try:
        rows = namespace_view.namespaces(config.bpffs_root, config.proc_root, config.cgroup_root)
    except NotFound:
        return
    except KernelError as failure:
        remedy = failure.hint or "run as the agent does, privileged"
        yield Check(NODE, FEATURE, State.OPTIONAL, failure.message, remedy, Page.SOCKET_PATH)
        return
    others = [each for each in rows if each.path == namespace_view.PACKET]
    # The first part of a reason names the pod.
    reasons = collections.Counter(each.reason.partition("; ")[2] or each.reason for each in others)
    parts = [f"{len(rows) - len(others)} of {len(rows)} network namespaces of pods and guests"]
    parts += [f"{number} not: {reason}" for reason, number in sorted(reasons.items())]
    yield Check(NODE, FEATURE, State.PRESENT, "; ".join(parts), "", Page.SOCKET_PATH)
