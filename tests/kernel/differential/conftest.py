"""The labs of all modes, made once."""

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import Unsupported
from ebpfproxy.modes.choice import MODES
from tests.kernel.differential.subject import Subject

SUBJECTS = {
    "ebpf": ("ebpf", {}),
    "ebpf-off": ("ebpf", {"socket_lb": "off"}),
    "iptables": ("iptables", {"iptables_flavour": "legacy"}),
    "iptables-nft": ("iptables", {"iptables_flavour": "nft"}),
    "nftables": ("nftables", {}),
}
"""A mode, and texts of its configuration. What it does otherwise than the reference is in differences.py. One
that the kernel has not got is left out, with a warning."""


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Subject, ...]]:
    """The lock that iptables takes is the machine's; the rules in a lab are nobody else's."""
    modes = {mode.name: mode for mode in MODES}
    processors = itertools.cycle(sorted(os.sched_getaffinity(0)))
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as opened:
        patch.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables"))
        made = []
        for name, (mode, texts) in SUBJECTS.items():
            try:
                made.append(opened.enter_context(Subject(name, modes[mode], texts, next(processors))))
            except Unsupported as lack:
                warnings.warn(f"left out: {name}: {lack.message}", pytest.PytestWarning, stacklevel=1)
        yield tuple(made)
