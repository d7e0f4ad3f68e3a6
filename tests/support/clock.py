"""A clock that tests move."""


class Clock:
    """It stands still unless `now`, in seconds, is changed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
