"""Reads the HTTP pages of a running agent, or of another proxy at kube-proxy's ports."""

import http.client
from typing import NamedTuple

from ebpfproxy.errors import Rejected

_SECONDS = 5.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Page(NamedTuple):
    """The HTTP status and the text."""

    status: int
    text: str


def read(listen: tuple[str, int], path: str) -> Page:
    """Return the page of the server that listens at this address. Raises Rejected if there is no answer."""
    host = _ANY.get(listen[0], listen[0])
    connection = http.client.HTTPConnection(host, listen[1], timeout=_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return Page(response.status, response.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Rejected(f"cannot read {path} from {host}:{listen[1]}: {reason}") from error
    finally:
        connection.close()


def read_text(listen: tuple[str, int], path: str) -> str:
    """Return the text of a page, "" without an answer or with another status than 200."""
    try:
        page = read(listen, path)
    except Rejected:
        return ""
    return page.text.strip() if page.status == http.client.OK else ""
