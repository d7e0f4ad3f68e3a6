"""Every error that ebpfproxy raises on purpose, as one tree.

    EbpfProxyError
    ├── ConfigError          a flag, a file of ours or the environment is wrong       exit 2
    ├── SourceError          the API server or a manifest could not be read           exit 3
    │   └── InvalidObject    one object cannot be served; the others can
    └── KernelError          the kernel rejected, or has not got, what we need         exit 4
        ├── NotFound
        ├── AlreadyExists
        ├── TableFull        a map or table is too small for the plan
        ├── Unsupported      this kernel, or this set of capabilities, has no such thing
        ├── Rejected         the kernel has it and said no
        │   └── ProgramRejected  the kernel does not load a BPF program
        └── AbiMismatch      a pinned object has another layout than this version's

Errors of other people's libraries stop at `kernel/` and `source/`. Raise where the fact is known,
catch where a decision is taken: in `cli/`, `daemon`, `source/` and `proxier`.
"""


class EbpfProxyError(Exception):
    """What went wrong, in one line that names the thing, and what to do about it.

    `exit_code` is what a command that ends because of it returns. 1 is kept for unexpected errors.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(EbpfProxyError):
    """A flag, a file of ours or the environment is wrong."""

    exit_code = 2


class SourceError(EbpfProxyError):
    """The API server or a manifest could not be read."""

    exit_code = 3


class InvalidObject(SourceError):
    """One object cannot be served. It is skipped, named and counted; it never stops a sync."""


class KernelError(EbpfProxyError):
    """The kernel rejected, or has not got, what we need."""

    exit_code = 4


class NotFound(KernelError):
    """The kernel has no object of that name or key."""


class AlreadyExists(KernelError):
    """The kernel has such an object already, and it is not to be replaced."""


class TableFull(KernelError):
    """A map or table is too small for the plan; what fits is served."""


class Unsupported(KernelError):
    """This kernel, or this set of capabilities, has no such thing."""


class Rejected(KernelError):
    """The kernel has it and said no."""


class ProgramRejected(Rejected):
    """The kernel does not load a BPF program.

    `program` is its name, `errno` that of the system call, or 0 where there was none. `verifier` holds the
    last lines of the verifier's log, the reason last; it is empty where there is none. The complete log
    is a note of the error.
    """

    def __init__(self, message: str, hint: str, program: str, errno: int, verifier: tuple[str, ...]) -> None:
        super().__init__(message, hint)
        self.program = program
        self.errno = errno
        self.verifier = verifier


class AbiMismatch(KernelError):
    """A pinned object has another layout than the one this version speaks."""
