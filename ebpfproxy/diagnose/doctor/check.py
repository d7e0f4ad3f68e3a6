"""One row of the report: a feature or property of the node, its state, and the remedy."""

import enum
from typing import NamedTuple

from ebpfproxy.diagnose.doctor.links import Page

NODE = "node"
"""The subject of checks that do not belong to one mode."""


class State(enum.StrEnum):
    """`REQUIRED`: the mode, or any mode, does not work correctly without it. `OPTIONAL`: there is a
    limitation."""

    PRESENT = "present"
    REQUIRED = "missing (required)"
    OPTIONAL = "missing (optional)"


class Check(NamedTuple):
    """A row.

    - `subject`: the name of a mode, or NODE.
    - `detail`: what was found; if it is missing, what that means.
    - `remedy`: an imperative sentence; "" if nothing is missing.
    - `page`: where the documentation describes it.
    """

    subject: str
    feature: str
    state: State
    detail: str
    remedy: str
    page: Page

    @property
    def link(self) -> str:
        return self.page.path
