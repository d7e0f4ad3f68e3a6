"""The declaration of one option: what stands beside a field of `Config`."""

import dataclasses
from typing import Any

from ebpfproxy.config.kinds import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """`flags` as typed, ``--sync-period`` or ``-v`` and ``--v``; `default` in the flag's own text.

    A `default` of None means that not giving the flag differs from any text; `help` explains it then.
    `group` is the heading of the help under which the option stands.
    """

    name: str
    flags: tuple[str, ...]
    kind: Kind
    default: str | None
    group: str
    help: str

    @property
    def flag(self) -> str:
        """The long form, by which messages name the option."""
        return self.flags[-1]

    def parse(self, text: Any) -> Any:
        """The value of `text`: a str, or of a kind that is many a sequence of them.

        None, or an empty sequence, takes the default.

        Raises ValueError.
        """
        if text is not None and text != ():
            return self.kind.parse(text)
        if self.default is None:
            return None
        return self.kind.parse([self.default] if self.kind.many else self.default)


def option(flags: str, kind: Kind, default: str | None, group: str, help: str) -> Any:
    """A field of `Config`; `flags` are separated by spaces, the long form last."""
    declared = Option("", tuple(flags.split()), kind, default, group, help)
    return dataclasses.field(default=declared.parse(None), metadata={"option": declared})


def declared_by(cls: type) -> dict[str, Option]:
    """The options of a dataclass by the name of their field, in the order they were written."""
    return {
        field.name: dataclasses.replace(field.metadata["option"], name=field.name)
        for field in dataclasses.fields(cls)
    }
