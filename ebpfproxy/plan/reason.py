"""The reasons of steps: why something happens to a connection, or why an object is planned as it is."""

import enum


class AnyReason(enum.Enum):
    """The base of all reasons. The value of a member is "subject: meaning", in one line."""

    @property
    def word(self) -> str:
        """The name in brackets and in JSON, for example "ReadyOnNode"."""
        return "".join("IP" if part == "IP" else part.capitalize() for part in self.name.split("_"))

    @property
    def subject(self) -> str:
        """The kind of step that it belongs to."""
        subject: str = self.value.partition(": ")[0]
        return subject

    @property
    def meaning(self) -> str:
        """One line for readers."""
        meaning: str = self.value.partition(": ")[2]
        return meaning
