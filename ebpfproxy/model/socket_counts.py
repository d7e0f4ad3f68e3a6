"""What became of connected UDP sockets whose endpoint is gone."""

from typing import NamedTuple


class SocketCounts(NamedTuple):
    """Of one search. `left` are still stale after it; the other fields are to be added up over searches."""

    reconnected: int = 0
    destroyed: int = 0
    not_destroyed: int = 0
    left: int = 0
