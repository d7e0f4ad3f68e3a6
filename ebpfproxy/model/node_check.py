"""Health checks of nodes by an edge, which is a machine outside the cluster."""

from typing import NamedTuple


class NodeCheck(NamedTuple):
    """A check of one node: GET /healthz at `port`, which is that of the service proxy or of one Service."""

    node: str
    port: int
