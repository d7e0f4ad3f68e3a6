"""One change of a text by a mutation operator."""

from typing import NamedTuple


class Edit(NamedTuple):
    """Replaces the characters from `start` to `end` of a file. They are in the body of `function`."""

    function: str
    operator: str
    start: int
    end: int
    replacement: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.replacement + text[self.end :]

    def lines(self, text: str) -> tuple[str, str]:
        """The lines that change, before and after."""
        start = text.rfind("\n", 0, self.start) + 1
        after = len(text) - text.find("\n", self.end)
        changed = self.apply(text)
        return text[start : len(text) - after], changed[start : len(changed) - after]
