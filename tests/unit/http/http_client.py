"""An HTTP client for one request on loopback, without redirects or decoding."""

import http.client
from typing import NamedTuple


class Answer(NamedTuple):
    code: int
    body: bytes
    headers: dict[str, str]


def ask(port: int | None, path: str, method: str = "GET", host: str = "127.0.0.1", **headers: str) -> Answer:
    """`headers` with ``_`` for ``-``."""
    assert port is not None
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )
        response = connection.getresponse()
        return Answer(response.status, response.read(), dict(response.getheaders()))
    finally:
        connection.close()
