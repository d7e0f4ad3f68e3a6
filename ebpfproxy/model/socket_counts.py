"""What became of connected UDP sockets whose endpoint is gone."""

from typing import NamedTuple


class SocketCounts(NamedTuple):
    """Of one search. After it, `left` are stale, and `translated` by the packet path; the other fields are to
    be added up over searches."""

    reconnected: int = 0
    destroyed: int = 0
    not_destroyed: int = 0
    left: int = 0
    translated: int = 0
