"""Moments as Go prints them: time.Time.String(), which clients of kube-proxy's /healthz parse."""

import time

NEVER = "0001-01-01 00:00:00 +0000 UTC"
"""Go's zero time."""


def format_moment(wall: int, since_start: float) -> str:
    """The moment `wall`, in nanoseconds of Unix time, in the local time zone.

    `since_start` is the same moment in seconds since the process began, by the clock that never goes back.

    >>> format_moment(1_700_000_000_120_000_000, 12.3).endswith(" m=+12.300000000")
    True
    """
    seconds, nanoseconds = divmod(wall, 1_000_000_000)
    local = time.localtime(seconds)
    fraction = f".{nanoseconds:09d}".rstrip("0").rstrip(".")
    zone = time.strftime("%z", local)
    monotonic = f"m={since_start:+.9f}"
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', local)}{fraction} {zone} {local.tm_zone} {monotonic}"
