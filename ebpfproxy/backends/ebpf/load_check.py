"""Compiling and loading the real programs, for who wants to know whether this kernel takes them.

Nothing is pinned or attached, so that nothing remains of it. The maps are small: the memory of an agent's own
would be needed a second time, and the verifier does not go by their sizes.
"""

import errno

from ebpfproxy.backends.ebpf import features
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.ebpf.programs import available_hooks, sources, specs
from ebpfproxy.backends.findings import Finding
from ebpfproxy.errors import KernelError, ProgramRejected
from ebpfproxy.linux.bpf.bpf import errno_of
from ebpfproxy.linux.bpf.compiler import try_to_load

FEATURE = "the BPF programs"
_SIZES = MapSizes(64, 64, 64, 64, 64, 64, 64)


def try_out() -> Finding:
    """Whether the kernel loads every program. It takes about 4 s, most of which is the compiler's."""
    try:
        try_to_load(sources(), _SIZES.defines() | features.defines(), specs(available_hooks()))
    except ProgramRejected as failure:
        return _finding(failure, failure.errno)
    except KernelError as failure:
        return _finding(failure, errno_of(failure))
    return Finding(FEATURE)


def _finding(failure: KernelError, number: int) -> Finding:
    return Finding(FEATURE, number or errno.EINVAL, failure.message, failure.hint)
