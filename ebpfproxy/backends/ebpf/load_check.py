"""Loads the real programs, to find out whether this kernel accepts them.

It pins and attaches nothing, so nothing remains. The maps are small, since maps of full size would take the
memory of an agent's maps a second time. The verifier does not depend on their sizes.
"""

import errno

from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES
from ebpfproxy.backends.ebpf.programs import available_hooks, object_file, specs
from ebpfproxy.backends.findings import Finding
from ebpfproxy.errors import KernelError, ProgramRejected
from ebpfproxy.linux.bpf.bpf import errno_of
from ebpfproxy.linux.bpf.loader import loaded

FEATURE = "the BPF programs"


def try_out() -> Finding:
    """Whether the kernel loads every program. It takes about 1 s, and 4 s more if it has to compile them."""
    try:
        with loaded(object_file(), specs(available_hooks()), COMPILED_SIZES.numbers()):
            return Finding(FEATURE)
    except ProgramRejected as failure:
        return _finding(failure, failure.errno)
    except KernelError as failure:
        return _finding(failure, errno_of(failure))


def _finding(failure: KernelError, number: int) -> Finding:
    return Finding(FEATURE, number or errno.EINVAL, failure.message, failure.hint)
