"""A copy of this installation with changed C sources."""

import shutil
import time
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2] / "ebpfproxy"
_BODY = "return find_neighbor(skb, ETHERNET_HEADER, egress(skb, ETHERNET_HEADER));"
REJECTED = "to_any"
"""The program that the verifier rejects in `with_rejected_program`."""
REASON = "invalid mem access"
"""The verifier's message."""


def with_rejected_program(folder: Path) -> Path:
    """Copy package and sources below `folder`; one program reads from an invalid address.

    Started in the returned folder, `python -m ebpfproxy` runs this copy.
    """
    copy = _copied(folder)
    reject(copy / "bpf")
    return copy


def with_new_programs(folder: Path) -> Path:
    """As `with_rejected_program`, with sources for which no object file exists. So the agent compiles."""
    copy = _copied(folder)
    with (copy / "bpf" / "tc.c").open("a") as source:
        source.write(f"\nint unused_{time.time_ns()}(struct __sk_buff *skb) {{ return 0; }}\n")
    return copy


def _copied(folder: Path) -> Path:
    copy = folder / "altered"
    shutil.copytree(_PACKAGE, copy / "ebpfproxy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(_PACKAGE.parent / "bpf", copy / "bpf")
    return copy


def reject(sources: Path) -> None:
    """Change the program REJECTED in these C sources so that the verifier rejects it."""
    source = sources / "tc.c"
    text = source.read_text()
    assert text.count(_BODY) == 1, "choose another program"
    source.write_text(text.replace(_BODY, "return *(int *)(long)skb->mark;"))
