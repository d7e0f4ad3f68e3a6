"""Mutation operators: the places where a standard small change of the code is possible.

An edit replaces only the text of one expression, operator or statement. The rest of the file keeps each byte.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

from tests.mutations import c_operators, python_operators
from tests.mutations.edit import Edit


class Place(NamedTuple):
    """Where a mutation is, in terms that usually outlast changes of the code around it.

    `file` is relative to the checkout. `function`: with the names of the classes and functions around it.
    `ordinal`: among the edits of this operator in this function, from 1.
    """

    file: str
    function: str
    operator: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.file} {self.function} {self.operator} {self.ordinal}"


def edits(root: Path, file: str) -> dict[Place, Edit]:
    """All edits of a file of the checkout `root`. Empty if there is no such file."""
    path = root / file
    return edits_of_text(file, path.read_text()) if path.is_file() else {}


def edits_of_text(file: str, text: str) -> dict[Place, Edit]:
    """All edits of the text of a file. The name of the file determines its language."""
    found = python_operators.edits(text) if file.endswith(".py") else c_operators.edits(text)
    in_order = sorted(found, key=lambda edit: (edit.function, edit.operator, edit.start))
    return {
        Place(file, function, operator, ordinal): edit
        for (function, operator), same in itertools.groupby(in_order, lambda edit: edit[:2])
        for ordinal, edit in enumerate(same, 1)
    }
