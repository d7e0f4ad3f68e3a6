"""The result of a probe: whether this machine has one feature that a backend requires or prefers."""

import errno
from typing import NamedTuple

FAMILY_NOT_SERVED = "Address family is not served"
"""The kernel or the node has no tool for it; `family` and `reason` name it."""


class Finding(NamedTuple):
    """Whether one feature is present, and what its absence means.

    - `failure`: the errno of the kernel or of starting a tool; 0 if the feature is present.
    - `missing` and `remedy`: what is missing, and what to do about it. One line each; empty if the feature is
      present.
    - `needed`: the backend cannot serve without the feature. Otherwise it serves with a limitation, which
      `missing` states.
    - `preferred`: `auto` selects a mode without the feature only if every other mode also lacks a preferred
      feature.
    - `modules`: the kernel modules that may provide a missing feature.
    """

    feature: str
    failure: int = 0
    missing: str = ""
    remedy: str = ""
    needed: bool = True
    preferred: bool = False
    modules: tuple[str, ...] = ()

    @property
    def present(self) -> bool:
        return self.failure == 0

    def __str__(self) -> str:
        """
        >>> str(Finding("cgroup v2", errno.ENOENT, "no cgroup2 file system is mounted"))
        'cgroup v2: no cgroup2 file system is mounted (ENOENT)'
        >>> str(Finding("cgroup v2"))
        'cgroup v2: present'
        """
        if self.present:
            return f"{self.feature}: present"
        return f"{self.feature}: {self.missing} ({errno.errorcode.get(self.failure, self.failure)})"
