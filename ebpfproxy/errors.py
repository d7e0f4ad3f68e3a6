"""The error classes of ebpfproxy: every expected error is an EbpfProxyError.

    EbpfProxyError
    ├── ConfigError          a flag, the configuration or the environment is invalid  exit 2
    ├── SourceError          the API server or a manifest cannot be read              exit 3
    │   └── InvalidObject    one object cannot be served; the others can
    └── KernelError          the kernel rejects or lacks something that is needed      exit 4
        ├── NotFound
        ├── AlreadyExists
        ├── TableFull        a map or table is too small for the plan
        ├── Unsupported      the kernel or the capabilities of the process lack a feature
        ├── Rejected         the kernel has the feature and rejected the request
        │   └── ProgramRejected  the kernel does not load a BPF program
        └── AbiMismatch      a pinned object has a layout that this version cannot read

`linux/` and `api/` convert errors of the kernel and of third-party libraries to these classes. Code raises an
error where the fact is known. Code catches an error where it takes a decision, never only to log it.
"""

from typing import NamedTuple


class ExitCode(NamedTuple):
    """An exit code of a command. `causes` lists typical ones; it is "" if `meaning` says it all."""

    code: int
    meaning: str
    causes: str = ""


INTERRUPTED, CLOSED = 130, 141
EXIT_CODES = (
    ExitCode(0, "the command is done", "run: ended by a signal"),
    ExitCode(
        1,
        "the command found a problem, or an unexpected error occurred",
        "doctor: something is missing; verify: the kernel differs, or a path fails; "
        "explain: a port does not work; bench: a connection failed; "
        "a bug: run the command again with -v=4 for the traceback",
    ),
    ExitCode(
        2,
        "a flag, a file or the environment is invalid",
        "an unknown flag; no kubeconfig; demo or bench without root",
    ),
    ExitCode(
        3,
        "the API server or a manifest cannot be read",
        "the API server does not answer or rejects the credentials. run tries again instead",
    ),
    ExitCode(
        4,
        "the kernel rejected or lacks something that is needed",
        "not root; no capability; an old kernel; no bcc; another agent; with auto: no mode works",
    ),
    ExitCode(INTERRUPTED, "interrupted by Ctrl-C", "run, monitor and dump --watch end with 0 instead"),
    ExitCode(CLOSED, "nothing reads the output any more", "a pipe to head"),
)
"""Every exit code. The help and docs/configuration.md#exit-codes are made from it."""


class EbpfProxyError(Exception):
    """An expected error.

    `message` is one line that names the object. `hint` says what to do about the error, or is "".
    `exit_code` is the exit code of a command that ends because of the error. 1 is reserved for unexpected
    errors.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(EbpfProxyError):
    """A flag, the configuration file or the environment is invalid."""

    exit_code = 2


class SourceError(EbpfProxyError):
    """The API server or a manifest cannot be read."""

    exit_code = 3


class InvalidObject(SourceError):
    """One object cannot be served. The agent skips, logs and counts it; it never stops a sync."""


class KernelError(EbpfProxyError):
    """The kernel rejects or lacks something that ebpfproxy needs.

    `kind` is equal for errors with the same reason, even if figures in their messages differ. By default it
    is the message. `in_force`: the kernel has a part of the rejected entry, or its previous state.
    """

    exit_code = 4
    in_force = False

    def __init__(self, message: str, hint: str = "", *, kind: str = "") -> None:
        super().__init__(message, hint)
        self.kind = kind or message


class NotFound(KernelError):
    """The kernel has no object with this name or key."""


class AlreadyExists(KernelError):
    """The kernel already has an object with this name or key, and it must not be replaced."""


class TableFull(KernelError):
    """A map or table is too small for the plan. The entries that fit are served.

    `table`: its name, "" if it has a fixed size.
    """

    table = ""


class NotYet(KernelError):
    """Postponed: the change would take too long. The next one can include this part. `has_begun`: it should
    be the first part, since some of the work is done."""

    has_begun = False


class Unsupported(KernelError):
    """The kernel, or the set of capabilities of the process, lacks a feature."""


class Rejected(KernelError):
    """The kernel has the feature and rejected the request."""


class ProgramRejected(Rejected):
    """The kernel does not load a BPF program.

    `program` is the name of the program. `errno` is that of the system call, or 0 without a system call.
    `verifier` has the last lines of the verifier's log, of which the last is the reason; it is empty without
    a log. The complete log is a note (`__notes__`) of the error.
    """

    def __init__(self, message: str, hint: str, program: str, errno: int, verifier: tuple[str, ...]) -> None:
        super().__init__(message, hint)
        self.program = program
        self.errno = errno
        self.verifier = verifier


class AbiMismatch(KernelError):
    """A pinned object has a layout that this version cannot read."""
