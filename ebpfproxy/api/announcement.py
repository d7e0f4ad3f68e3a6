"""The annotation with which a Node announces that it accepts tunneled packets (direct server return)."""

import json
from collections.abc import Mapping
from typing import Protocol

from ebpfproxy.api.connection import StatusError
from ebpfproxy.api.event import NodeChanged
from ebpfproxy.api.fields import DSR_PORT as DSR_PORT
from ebpfproxy.api.parse import parse_list, parse_node
from ebpfproxy.api.resource import own_node
from ebpfproxy.errors import SourceError

_FORBIDDEN, _NOT_FOUND = 403, 404


class Merger(Protocol):
    """Access to the API server (`watch.Session`)."""

    def fetch(self, path: str, query: Mapping[str, str]) -> bytes: ...

    def merge(self, path: str, body: bytes) -> None: ...

    def close(self) -> None: ...


def read(session: Merger, node_name: str) -> int:
    """Return the UDP port that a Node announces; 0 if it announces none or does not exist.

    Raises SourceError.
    """
    of_node = own_node(node_name)
    page = parse_list(session.fetch(of_node.path, of_node.query))
    found = [parse_node(each) for each in page.items]
    return next((each.node.dsr_port for each in found if isinstance(each, NodeChanged) and each.node), 0)


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
