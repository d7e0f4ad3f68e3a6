"""iptables by its own tools: a table as text, saved and restored, for one backend and one family.

The rules that the tools of the backend legacy show are not those of the backend nft; the kernel goes by both.
Everything here acts in the network namespace that the calling thread is in.

Sources: iptables-save(8), iptables-restore(8), xtables-legacy(8), xtables-nft(8) of iptables 1.8.9.
"""

import enum
import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ebpfproxy.errors import KernelError, Rejected, Unsupported
from ebpfproxy.linux.xtables import legacy
from ebpfproxy.linux.xtables.lock_file import XtablesLock
from ebpfproxy.model.address import Family

TIMEOUT = 300.0
"""Seconds after which a tool is taken to hang. 10 000 Services may take iptables-nft half a minute."""

LOCK_PATIENCE = 5
"""Seconds for which a tool waits for /run/xtables.lock, as those that kube-proxy starts do."""

_STEMS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
_FOLDERS = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_SCRIPT = ("--noflush",)
_NONE_SUCH = 1
"""With what status a tool ends that finds no such chain; with others it could not look."""
_LOCKED = "xtables lock"
_PERMISSION = re.compile(r"Permission denied|you must be root|Operation not permitted")
_NO_TABLE = re.compile(r"unable to initialize table|can't initialize ip6?tables table")
_VERSION = re.compile(r"v(?P<number>[0-9.]+)(?: \((?P<backend>[a-z_]+)\))?")
_SPEAKER = re.compile(r"^[\w-]+(?: v[0-9.]+)?(?: \([a-z_]+\))?: *")
_AT_LINE = re.compile(r"Error occurred at line: (\d+)")
_LINE = re.compile(r"(?:^|.*: )line (\d+)(?:: | failed(?:: )?)(.*)")


class ToolBackend(enum.StrEnum):
    LEGACY = "legacy"
    NFT = "nft"


class LinesRejected(Rejected):
    """`lines`: what the tool said, by the number of the line of the text, from 1.

    The line of a COMMIT stands for all before it: the kernel does not report which one it was to
    iptables-legacy. Of the tables before that one everything is in force, of this one and those behind it
    nothing.
    """

    def __init__(self, message: str, lines: Mapping[int, str]) -> None:
        super().__init__(message, "iptables and the kernel must both have the matches and targets in it")
        self.lines = lines


class Iptables:
    """The tools of one backend and family. Get one by `find`."""

    def __init__(self, family: Family, tool_backend: ToolBackend, stem: str, version: str) -> None:
        """`stem`: the path of what is called iptables, from which -save and -restore are called, too."""
        self.family = family
        self.tool_backend = tool_backend
        self.version = version
        self._stem = stem

    def __str__(self) -> str:
        return f"{_STEMS[self.family]}-{self.tool_backend}"

    def save(self) -> str:
        """What iptables-save prints: every table that there is. It makes none.

        They are not asked for one by one, since iptables-nft reads all of them for each. Raises KernelError.
        """
        done = _run((f"{self._stem}-save",))
        if done.code:
            raise self._failure("cannot read the tables", done)
        return done.output

    def show(self, table: str, chain: str) -> list[str]:
        """The lines that make this chain, from -N or -P on; empty where there is none such.

        That does not take the reading of a table, nor makes one. Raises KernelError where it cannot look.
        """
        if self.tool_backend is ToolBackend.LEGACY and table not in legacy.tables(self.family):
            return []
        done = _run((self._stem, "-w", str(LOCK_PATIENCE), "-t", table, "-S", chain))
        if done.code not in (0, _NONE_SUCH):
            raise self._failure(f"cannot show {chain}", done)
        return [] if done.code else done.output.splitlines()

    def restore(self, text: str) -> None:
        """Bring in what iptables-restore reads, without emptying what it does not name (--noflush).

        Each table, or each part of it up to a COMMIT, comes into force at once or not at all.
        Raises LinesRejected, Rejected where another process holds the lock for `LOCK_PATIENCE` seconds,
        Unsupported where the kernel has no such table, else KernelError.
        """
        if self._waiting is None:
            with XtablesLock(LOCK_PATIENCE):
                done = _run((f"{self._stem}-restore", *_SCRIPT), text)
        else:
            done = _run((f"{self._stem}-restore", *_SCRIPT, *self._waiting), text)
        if done.code:
            lines = rejected_lines(done.errors)
            if lines and not _NO_TABLE.search(done.errors):
                number = min(lines)
                rejected = text.split("\n", number)[number - 1]
                raise LinesRejected(f"{self} rejected line {number}, {rejected}: {lines[number]}", lines)
            raise self._failure("cannot restore", done)

    def has_random_fully(self) -> bool:
        """Whether MASQUERADE has --random-fully: since iptables 1.6.2."""
        return "--random-fully" in _run((self._stem, "-j", "MASQUERADE", "--help")).output

    @functools.cached_property
    def _waiting(self) -> tuple[str, ...] | None:
        """The argument that makes it wait for the lock; None where it cannot be: before 1.6.2 restore took
        none."""
        patience = ("-w", str(LOCK_PATIENCE))
        for options in ((*patience, "-W", "100000"), patience):  # since 1.8.8 the second has no effect
            if not _run((f"{self._stem}-restore", *_SCRIPT, *options)).code:
                return options
        return None

    def _failure(self, what: str, done: "_Done") -> KernelError:
        reason = _reason(done)
        if _LOCKED in done.errors:
            return Rejected(
                f"{self} {what}: another process holds the xtables lock",
                "lslocks shows which one has /run/xtables.lock; it is tried again",
            )
        if _PERMISSION.search(done.errors):
            return Rejected(f"{self} {what}: {reason}", "run as root, in a container as a privileged one")
        if _NO_TABLE.search(done.errors):
            return Unsupported(f"{self} {what}: {reason}", "the kernel lacks the module of this table")
        return KernelError(f"{self} {what}: {reason}", f"what {self} says is all that is known")


def find(family: Family, tool_backend: ToolBackend) -> Iptables:
    """The tools of that backend: those that have it in their names, else those that say that they are it.

    Raises Unsupported.
    """
    stem = _STEMS[family]
    for name in (f"{stem}-{tool_backend}", stem):
        found = _reported(name)
        if found and found.tool_backend is tool_backend:
            return Iptables(family, tool_backend, found.path, found.version)
    raise Unsupported(
        f"there is no {stem} of the tool_backend {tool_backend} here",
        "apt-get install iptables, or apk add iptables",
    )


def plain_tool_backend(family: Family) -> ToolBackend | None:
    """What is called just iptables; None where there is no such."""
    found = _reported(_STEMS[family])
    return found.tool_backend if found else None


def rejected_lines(errors: str) -> dict[int, str]:
    """What iptables-restore wrote about lines of its input, by their numbers; empty where it is about none.

    >>> rejected_lines("iptables-restore: line 7 failed\\n")
    {7: 'rejected by the kernel'}
    >>> rejected_lines("iptables-nft-restore v1.8.9 (nf_tables): \\nline 3: CHAIN_DEL failed (Busy): chain A")
    {3: 'CHAIN_DEL failed (Busy): chain A'}
    >>> rejected_lines("iptables-restore v1.8.9 (legacy): no target\\n\\nError occurred at line: 4\\n")
    {4: 'no target'}
    """
    lines: dict[int, str] = {}
    said = ""
    for line in errors.splitlines():
        if found := _AT_LINE.match(line):
            lines[int(found[1])] = said
        elif found := _LINE.fullmatch(line):
            lines.setdefault(int(found[1]), found[2] or "rejected by the kernel")
        else:
            said = _SPEAKER.sub("", line).strip() or said
    return lines


class _Done(NamedTuple):
    code: int
    output: str
    errors: str


def _run(command: Sequence[str], text: str = "") -> _Done:
    """A tool, run to its end. Bytes that are no UTF-8, in a comment, pass as they are.

    It reads from a file in memory: the alarm that iptables-legacy sets while it waits for the lock is not
    taken back when it has it (xtables_lock() of 1.8.9), and goes off in the middle of a long text. Reading
    from a pipe would end there.
    """
    try:
        with open(os.memfd_create("iptables"), "w+b") as script:
            script.write(text.encode(errors="surrogateescape"))
            script.seek(0)
            done = subprocess.run(
                command,
                stdin=script,
                capture_output=True,
                timeout=TIMEOUT,
                env=os.environ | {"LC_ALL": "C"},
                process_group=0,  # a Ctrl-C is for us, not for a tool in the middle of a table
                check=False,
            )
    except subprocess.TimeoutExpired as failure:
        raise KernelError(f"{command[0]} has not ended after {TIMEOUT:.0f} s, and was killed") from failure
    except OSError as failure:
        raise Unsupported(f"{command[0]} cannot be started: {failure.strerror}") from failure
    return _Done(done.returncode, _decoded(done.stdout), _decoded(done.stderr))


def _decoded(output: bytes) -> str:
    return output.decode(errors="surrogateescape")


class _Reported(NamedTuple):
    """What a tool says of itself. `version` as in "1.8.9"."""

    path: str
    version: str
    tool_backend: ToolBackend


def _reported(name: str) -> _Reported | None:
    """None where there is no such tool, or not all of it. Before 1.8 there was legacy alone."""
    path = shutil.which(name, path=_FOLDERS)
    if not path or not all(shutil.which(f"{path}-{action}") for action in ("save", "restore")):
        return None
    done = _run((path, "--version"))
    found = _VERSION.search(done.output)
    if done.code or not found:
        return None
    return _Reported(
        path, found["number"], ToolBackend.NFT if found["backend"] == "nf_tables" else ToolBackend.LEGACY
    )


def _reason(done: _Done) -> str:
    """What a tool said last before its advice to read the help."""
    said = [_SPEAKER.sub("", line).strip() for line in done.errors.splitlines()]
    said = [line for line in said if line and not line.startswith(("Try `", "Error occurred", "Ignoring "))]
    if done.code < 0:
        return f"it was ended by {signal.Signals(-done.code).name}"
    return said[-1] if said else f"it ended with {done.code}"
