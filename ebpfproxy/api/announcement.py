"""The annotation with which a Node announces that it accepts tunneled packets (direct server return)."""

import json
from typing import Protocol

from ebpfproxy.api.connection import StatusError
from ebpfproxy.api.fields import DSR_PORT
from ebpfproxy.errors import SourceError

_FORBIDDEN, _NOT_FOUND = 403, 404


class Merger(Protocol):
    """Access to the API server (`watch.Session`)."""

    def merge(self, path: str, body: bytes) -> None: ...

    def close(self) -> None: ...


def write(session: Merger, node_name: str, port: int) -> None:
    """Announce the UDP port of tunneled packets; remove the annotation if `port` is 0.

    A Node that does not exist has nothing to remove. Raises SourceError, with a remedy.
    """
    annotations = {DSR_PORT: str(port) if port else None}
    body = json.dumps({"metadata": {"annotations": annotations}}).encode()
    try:
        session.merge(f"/api/v1/nodes/{node_name}", body)
    except StatusError as failure:
        if failure.code == _NOT_FOUND and not port:
            return
        raise SourceError(failure.message, _remedy(failure, node_name, port)) from None


def by_hand(node_name: str, port: int) -> str:
    """Return the command with which an operator makes the same change."""
    value = f"{DSR_PORT}={port} --overwrite" if port else f"{DSR_PORT}-"
    return f"kubectl annotate node {node_name} {value}"


def _remedy(failure: StatusError, node_name: str, port: int) -> str:
    if failure.code == _FORBIDDEN:
        command = by_hand(node_name, port)
        return f"grant the service account the verb patch on nodes, or run: {command}"
    return failure.hint
