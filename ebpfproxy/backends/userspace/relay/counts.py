"""The counters of a relay."""

import enum


class Event(enum.StrEnum):
    """What a relay counts, by name in metrics."""

    ACCEPTED = "tcp_accepted"
    CONNECTED = "tcp_connected"
    RETRIED = "tcp_retried"
    FAILED = "tcp_failed"
    REJECTED = "tcp_rejected"
    RESET = "tcp_reset"
    IDLE = "tcp_idle"
    NOT_ACCEPTED = "tcp_not_accepted"
    FLOWS = "udp_flows"
    FLOWS_EVICTED = "udp_flows_evicted"
    DATAGRAMS_DROPPED = "udp_dropped"

    __hash__ = str.__hash__
