"""A copy of this installation whose C sources a test has changed."""

import shutil
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2] / "ebpfproxy"
_BODY = "return egress(skb, ETHERNET_HEADER);"
REJECTED = "to_any"
"""The program that the verifier rejects in `with_rejected_program`."""
REASON = "invalid mem access"
"""What the verifier says of it."""


def with_rejected_program(folder: Path) -> Path:
    """Copy package and sources below `folder`. One program reads from an address that is a number.

    Started in the folder that is returned, `python -m ebpfproxy` is that copy.
    """
    copy = folder / "altered"
    shutil.copytree(_PACKAGE, copy / "ebpfproxy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(_PACKAGE.parent / "bpf", copy / "bpf")
    reject(copy / "bpf")
    return copy


def reject(sources: Path) -> None:
    """Have the verifier reject the program REJECTED of these C sources."""
    source = sources / "tc.c"
    text = source.read_text()
    assert text.count(_BODY) == 1, "another program has to be chosen"
    source.write_text(text.replace(_BODY, "return *(int *)(long)skb->mark;"))
