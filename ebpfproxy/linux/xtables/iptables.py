"""Runs the tools of iptables: saves and restores tables as text, for one iptables backend and one family.

The legacy tools and the nft tools show different rules. The kernel applies both.
All functions act in the calling thread's network namespace.

Sources: iptables-save(8), iptables-restore(8), xtables-legacy(8), xtables-nft(8) of iptables 1.8.9.
"""

import enum
import re
from collections.abc import Mapping
from typing import NamedTuple

from ebpfproxy.errors import KernelError, Rejected, Unsupported
from ebpfproxy.linux import tools
from ebpfproxy.linux.tools import Done
from ebpfproxy.linux.xtables import legacy
from ebpfproxy.model.address import Family

LOCK_PATIENCE = 5
"""Seconds for which a tool waits for /run/xtables.lock, as in kube-proxy."""

_STEMS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
_NO_CHAIN = 1
"""The exit status of a tool if the chain does not exist. Other statuses are failures."""
_RESOURCE_PROBLEM = 4
"""The exit status of a tool that lacks memory or a lock (enum xtables_exittype of iptables)."""
_LOCKED = "xtables lock"
_PERMISSION = re.compile(r"Permission denied|you must be root|Operation not permitted")
_NO_TABLE = re.compile(r"unable to initialize table|can't initialize ip6?tables table")
_VERSION = re.compile(r"v(?P<number>[0-9.]+)(?: \((?P<backend>[a-z_]+)\))?")
_TOOL_NAME = re.compile(r"^[\w-]+(?: v[0-9.]+)?(?: \([a-z_]+\))?: *")
_AT_LINE = re.compile(r"Error occurred at line: (\d+)")
_LINE = re.compile(r"(?:^|.*: )line (\d+)(?:: | failed(?:: )?)(.*)")


class ToolBackend(enum.StrEnum):
    LEGACY = "legacy"
    NFT = "nft"


class LinesRejected(Rejected):
    """iptables-restore rejected lines of its input. `lines`: the tool's messages, by line number from 1.

    The line of a COMMIT means that any line before it can be the cause: the kernel does not report the line
    to iptables-legacy. The tables before that COMMIT are in force. This table and the later ones are
    unchanged.
    """

    def __init__(self, message: str, lines: Mapping[int, str]) -> None:
        super().__init__(message, "check that iptables and the kernel support its matches and targets")
        self.lines = lines


class Iptables:
    """The tools of one iptables backend and family. Use `find` to create it."""

    def __init__(self, family: Family, tool_backend: ToolBackend, stem: str, version: str) -> None:
        """`stem`: the path of iptables. The paths of the other tools append -save and -restore to it."""
        self.family = family
        self.tool_backend = tool_backend
        self.version = version
        self._stem = stem

    def __str__(self) -> str:
        return f"{_STEMS[self.family]}-{self.tool_backend}"

    def save(self) -> str:
        """The output of iptables-save: all existing tables. It creates no table. Raises KernelError.

        Tables are not saved one by one, since iptables-nft reads all of them each time.
        """
        done = tools.run((f"{self._stem}-save",))
        if done.code:
            raise self._failure("cannot read the tables", done)
        return done.output

    def show(self, table: str, chain: str) -> list[str]:
        """The lines of this chain, starting with -N or -P; empty if the chain does not exist.

        It does not read the complete table, and creates none. Raises KernelError.
        """
        if self.tool_backend is ToolBackend.LEGACY and table not in legacy.tables(self.family):
            return []
        done = tools.run((self._stem, "-w", str(LOCK_PATIENCE), "-t", table, "-S", chain))
        if done.code not in (0, _NO_CHAIN):
            raise self._failure(f"cannot show {chain}", done)
        return [] if done.code else done.output.splitlines()

    def restore(self, text: str) -> None:
        """Apply text with iptables-restore. Chains that it does not mention stay (--noflush).

        Each part of a table up to a COMMIT takes effect atomically.
        Raises LinesRejected, Rejected if another process holds the lock for `LOCK_PATIENCE` seconds,
        Unsupported if the kernel does not have the table, else KernelError.
        """
        done = tools.run((f"{self._stem}-restore", "--noflush", "-w", str(LOCK_PATIENCE)), text)
        if done.code:
            lines = rejected_lines(done.errors)
            if lines and not _NO_TABLE.search(done.errors):
                number = min(lines)
                rejected = text.split("\n", number)[number - 1]
                raise LinesRejected(f"{self} rejected line {number}, {rejected}: {lines[number]}", lines)
            raise self._failure("cannot restore", done)

    def _failure(self, action: str, done: Done) -> KernelError:
        reason = _reason(done)
        if _LOCKED in done.errors:
            return Rejected(
                f"{self} {action}: another process holds the xtables lock",
                "find the process that holds /run/xtables.lock with lslocks; the agent retries",
            )
        if _PERMISSION.search(done.errors):
            return Rejected(f"{self} {action}: {reason}", "run as root, and in a container privileged")
        if _NO_TABLE.search(done.errors):
            return Unsupported(f"{self} {action}: {reason}", "load the kernel module of this table")
        return KernelError(f"{self} {action}: {reason}", f"run {self} by hand for details")


def find(family: Family, tool_backend: ToolBackend) -> Iptables:
    """The tools of an iptables backend: those with its name, else those that report it as their backend.

    Raises Unsupported if they are not installed, KernelError if they cannot run at the moment.
    """
    stem = _STEMS[family]
    for name in (f"{stem}-{tool_backend}", stem):
        found = _reported(name)
        if found and found.tool_backend is tool_backend:
            return Iptables(family, tool_backend, found.path, found.version)
    raise Unsupported(
        f"cannot find {stem} of the iptables backend {tool_backend}",
        "apt-get install iptables, or apk add iptables",
    )


def plain_tool_backend(family: Family) -> ToolBackend | None:
    """The iptables backend of the tool with the plain name (iptables, ip6tables); None if it is missing."""
    found = _reported(_STEMS[family])
    return found.tool_backend if found else None


def rejected_lines(errors: str) -> dict[int, str]:
    """The messages of iptables-restore about lines of its input, by line number.

    >>> rejected_lines("iptables-restore: line 7 failed\\n")
    {7: 'rejected by the kernel'}
    >>> rejected_lines("iptables-nft-restore v1.8.9 (nf_tables): \\nline 3: CHAIN_DEL failed (Busy): chain A")
    {3: 'CHAIN_DEL failed (Busy): chain A'}
    >>> rejected_lines("iptables-restore v1.8.9 (legacy): no target\\n\\nError occurred at line: 4\\n")
    {4: 'no target'}
    """
    lines: dict[int, str] = {}
    previous = ""
    for line in errors.splitlines():
        if found := _AT_LINE.match(line):
            lines[int(found[1])] = previous
        elif found := _LINE.fullmatch(line):
            lines.setdefault(int(found[1]), found[2] or "rejected by the kernel")
        else:
            previous = _TOOL_NAME.sub("", line).strip() or previous
    return lines


class _Reported(NamedTuple):
    """A tool's path, its version, such as "1.8.9", and its iptables backend."""

    path: str
    version: str
    tool_backend: ToolBackend


def _reported(name: str) -> _Reported | None:
    """The version and backend that a tool reports; None if one of the three tools is missing.

    Before 1.8 only the legacy backend existed. Raises KernelError if the tool cannot run at the moment.
    """
    path = tools.find(name)
    if not path or not all(tools.find(f"{path}-{action}") for action in ("save", "restore")):
        return None
    done = tools.run((path, "--version"))
    if _is_temporary(done):
        raise KernelError(f"cannot get the version of {path}: {_reason(done)}")
    found = _VERSION.search(done.output)
    if done.code or not found:
        return None
    return _Reported(
        path, found["number"], ToolBackend.NFT if found["backend"] == "nf_tables" else ToolBackend.LEGACY
    )


def _is_temporary(done: Done) -> bool:
    """Whether a tool failed for a reason that may be gone at the next run: a signal, or missing memory."""
    return done.code < 0 or done.code == _RESOURCE_PROBLEM


def _reason(done: Done) -> str:
    """The last message of a tool, without its advice to read the help."""
    lines = [_TOOL_NAME.sub("", line).strip() for line in done.errors.splitlines()]
    ignored = ("Try `", "Error occurred", "Ignoring ")
    lines = [line for line in lines if line and not line.startswith(ignored)]
    if done.killed_by:
        return f"killed by {done.killed_by}"
    return lines[-1] if lines else f"exit status {done.code}"
