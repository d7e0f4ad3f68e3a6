"""What is to be said of a configuration that is good all the same."""

from collections.abc import Mapping
from typing import NamedTuple


class Remark(NamedTuple):
    """A warning for the log, which is not set up yet while options are read: a message, and its values."""

    message: str
    values: Mapping[str, object]
