"""What a look at this machine found out about one feature that a backend needs or would rather have."""

import errno
from typing import NamedTuple

FAMILY_NOT_SERVED = "Address family is not served"
"""The kernel or the node has no tool for it; `family` and `reason` name it."""


class Finding(NamedTuple):
    """`failure` is the errno that the kernel, or the start of a tool, gave; 0 where the feature is there.

    `needed`: without it the backend cannot serve at all; otherwise it does so with less, which `missing`
    then says. `preferred`: `auto` takes a mode without it only where every other mode lacks something of that
    kind, too. `missing` and `remedy` are one line each, empty where the feature is there.
    """

    feature: str
    failure: int = 0
    missing: str = ""
    remedy: str = ""
    needed: bool = True
    preferred: bool = False

    @property
    def present(self) -> bool:
        return self.failure == 0

    def __str__(self) -> str:
        """
        >>> str(Finding("cgroup v2", errno.ENOENT, "no cgroup2 file system is mounted"))
        'cgroup v2: no cgroup2 file system is mounted (ENOENT)'
        >>> str(Finding("cgroup v2"))
        'cgroup v2: there'
        """
        if self.present:
            return f"{self.feature}: there"
        return f"{self.feature}: {self.missing} ({errno.errorcode.get(self.failure, self.failure)})"
