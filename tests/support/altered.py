"""A copy of this installation with changed C sources."""

import shutil
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2] / "ebpfproxy"
_BODY = "return egress(skb, ETHERNET_HEADER);"
REJECTED = "to_any"
"""The program that the verifier rejects in `with_rejected_program`."""
REASON = "invalid mem access"
"""The verifier's message."""


def with_rejected_program(folder: Path) -> Path:
    """Copy package and sources below `folder`; one program reads from an invalid address.

    Started in the returned folder, `python -m ebpfproxy` runs this copy.
    """
    copy = folder / "altered"
    shutil.copytree(_PACKAGE, copy / "ebpfproxy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(_PACKAGE.parent / "bpf", copy / "bpf")
    reject(copy / "bpf")
    return copy


def reject(sources: Path) -> None:
    """Change the program REJECTED in these C sources so that the verifier rejects it."""
    source = sources / "tc.c"
    text = source.read_text()
    assert text.count(_BODY) == 1, "choose another program"
    source.write_text(text.replace(_BODY, "return *(int *)(long)skb->mark;"))
