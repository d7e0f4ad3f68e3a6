"""What a reflector needs from the transport: requests, their errors, and the lines of a stream."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from ebpfproxy.errors import SourceError

_HINTS = {
    401: "renew the token or client certificate; the API server does not accept it",
    403: "grant the service account list and watch on services, nodes and endpointslices.discovery.k8s.io",
    404: "check that this is the address of a Kubernetes API server",
}


class StatusError(SourceError):
    """The API server answered with an HTTP error or an ERROR event. `retry_after` is in seconds."""

    def __init__(self, code: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"the API server answered {code}: {message}", _HINTS.get(code, ""))
        self.code = code
        self.retry_after = retry_after


class WatchSilent(SourceError):
    """A watch sent nothing for longer than its limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and timeouts, all in seconds. Only tests use other values than the defaults."""

    retry_first: float = 0.8
    retry_last: float = 30.0
    retry_reset: float = 120.0
    """A failure this long after the previous one counts as the first."""
    early: float = 1.0
    """A watch that ends sooner without an event counts as a failure, even if it ended without an error."""
    expired: float = 10.0
    """A watch that expires sooner after a list counts as a failure: the next list is delayed."""
    watch_shortest: float = 300.0
    watch_longest: float = 600.0
    punctual: float = 5.0
    """A watch that ends this long before its timeoutSeconds ends early: its server shuts down."""
    silence: float = 30.0
    """How long a watch may stay silent after its timeoutSeconds, if its server sends no bookmarks. Also how
    long a streaming list may be silent."""
    bookmark_silence: float = 180.0
    """How long a watch may stay silent if its server sends bookmarks: three times their interval."""
    refresh: float = 60.0
    """Credentials older than this are reloaded for the next session."""
    connect: float = 10.0
    answer: float = 65.0
    """For the head of an answer, and between two chunks of a page. The API server's own limit is 60."""
    warn_again: float = 600.0
    lacking: float = 600.0
    """How long to wait for an optional kind that the server does not have."""


USUAL_TIMING = Timing()


class Connection(Protocol):
    """A connection to the API server. All methods raise SourceError; StatusError for an error answer.

    `fetch` returns the body of an answer. `open` yields the chunks of an endless answer, and raises
    WatchSilent after `silence` seconds without a byte; `limit_silence` changes this limit for the open
    stream. `abort` ends a stream from another thread: its reader gets an error.
    """

    def fetch(self, path: str, query: Mapping[str, str]) -> bytes: ...
    def open(self, path: str, query: Mapping[str, str], silence: float) -> Iterator[bytes]: ...
    def limit_silence(self, seconds: float) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the non-empty lines of a stream of chunks. An unfinished last line is dropped.

    >>> list(split_lines([b'{"a":', b'1}\\n\\n{"b"', b':2}\\n{"c'])) == [b'{"a":1}', b'{"b":2}']
    True
    """
    parts: list[bytes] = []
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = b"".join([*parts, end])
            parts.clear()
            if line:
                yield line
        if rest:
            parts.append(rest)
