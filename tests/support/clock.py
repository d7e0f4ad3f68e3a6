"""A clock that tests set."""


class Clock:
    """A clock that only changes when a test sets `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
