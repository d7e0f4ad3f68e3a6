"""Finds the agent's log on a node: of its pod, or of its systemd unit."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ebpfproxy.diagnose.bundle.archive import Content
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux import journal

MOST = 5_000_000
"""The most bytes of a file that are read: its last ones."""

_LINES = 20_000
_UNIT = "ebpfproxy"
_PODS = "var/log/pods/*_*ebpfproxy*_*/*/*.log"  # /var/log/containers has links to these
_REMEDY = (
    "this process can read neither the node's /var/log/pods nor its journal; run "
    "`kubectl -n kube-system logs ds/ebpfproxy > FILE` and give --log=FILE"
)


def read_logs(proc_root: Path, given: Iterable[Path]) -> Content:
    """Return the given log files, else those of the agent's pods and unit.

    They are found in this mount namespace and in that of the node's first process. Raises NotFound, with the
    way to get them, if there are none, and OSError for a given file that cannot be read.
    """
    texts = [_headed(path, _tail(path)) for path in given]
    if texts:
        return Content("".join(texts))
    sources = list(dict.fromkeys(_of_pods((Path("/"), proc_root / "1/root"))))
    texts = [_headed(path, text) for path in sources if (text := _tail_if_readable(path))]
    failure = ""
    try:
        text = journal.read(_UNIT, _LINES)
        texts += [f"==> journal of {_UNIT} <==\n{text}"] if text else []
    except KernelError as error:
        failure = error.message
    if not texts:
        raise NotFound(f"found no log of the agent ({failure or 'the journal has no such unit'}): {_REMEDY}")
    return Content("".join(texts))


def _of_pods(roots: Iterable[Path]) -> Iterator[Path]:
    seen: set[tuple[int, int]] = set()
    for root in roots:
        try:
            found = sorted(root.glob(_PODS))
            for path in found:
                status = path.stat()
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    yield path
        except OSError:  # no permission, or a file that was just rotated
            continue


def _tail_if_readable(path: Path) -> str:
    try:
        return _tail(path)
    except OSError:
        return ""


def _tail(path: Path) -> str:
    """The last complete lines."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MOST)
        file.seek(start)
        content = file.read(MOST)
    if start:
        content = content.partition(b"\n")[2]
    return content.decode("utf-8", "replace")


def _headed(path: Path, text: str) -> str:
    return f"==> {path} <==\n{text}" + ("" if text.endswith("\n") or not text else "\n")
