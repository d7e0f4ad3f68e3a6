"""The interface of observers of requests to the API server."""

from typing import Protocol


class RequestObserver(Protocol):
    """Any thread may call it.

    - `transport_created`: a session has a new connection pool.
    - `requested`: a request was answered with a status code; None if it was not answered.
    - `completed`: an answer that has an end was read: its duration, and the bytes of both bodies.
    """

    def transport_created(self) -> None: ...

    def requested(self, method: str, host: str, code: int | None) -> None: ...

    def completed(self, method: str, host: str, seconds: float, sent: int, received: int) -> None: ...


class _Unobserved:
    def transport_created(self) -> None: ...

    def requested(self, method: str, host: str, code: int | None) -> None: ...

    def completed(self, method: str, host: str, seconds: float, sent: int, received: int) -> None: ...


UNOBSERVED_REQUESTS: RequestObserver = _Unobserved()
