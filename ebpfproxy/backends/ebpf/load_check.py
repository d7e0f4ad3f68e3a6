"""Compiles and loads the real programs, to find out whether this kernel accepts them.

It pins and attaches nothing, so nothing remains. The maps are small, since maps of full size would take the
memory of an agent's maps a second time. The verifier does not depend on their sizes.
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
    """Whether the kernel loads every program. It takes about 4 s, mostly for the compiler."""
    try:
        try_to_load(sources(), _SIZES.defines() | features.defines(), specs(available_hooks()))
    except ProgramRejected as failure:
        return _finding(failure, failure.errno)
    except KernelError as failure:
        return _finding(failure, errno_of(failure))
    return Finding(FEATURE)


def _finding(failure: KernelError, number: int) -> Finding:
    return Finding(FEATURE, number or errno.EINVAL, failure.message, failure.hint)
