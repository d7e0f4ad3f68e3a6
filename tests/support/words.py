"""Finds words in documents, docstrings and comments that the style guide discourages: `make check`.

Prints file, line and word; exit code 1 if there is any.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

DISCOURAGED = re.compile(
    r"\b(?:told|tells|lend|lends|lent|heals?|healed|withst(?:and|ood)|anew|nobody|somebody|whom|whoever"
    r"|lives? on|hangs on|goe?s? on|brought over|carried over|such as does)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"`[^`\n]*`")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)

Found = tuple[int, str]
"""The number of a line, and the word."""


def in_markdown(text: str) -> Iterator[Found]:
    """In prose: neither in a code block nor in backquotes.

    >>> list(in_markdown("It tells.\\n`tells`\\n"))
    [(1, 'tells')]
    """
    prose = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    yield from _found(_CODE.sub("", prose), 1)


def in_c(text: str) -> Iterator[Found]:
    for comment in _C_COMMENT.finditer(text):
        yield from _found(comment[0], text.count("\n", 0, comment.start()) + 1)


def in_python(text: str) -> Iterator[Found]:
    """In comments and in all strings: docstrings, messages, errors and hints."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and _is_prose(token.string)):
            yield from _found(_CODE.sub("", token.string), token.start[0])


def _is_prose(literal: str) -> bool:
    try:
        value = ast.literal_eval(literal)
    except (SyntaxError, ValueError):  # an f-string
        return True
    return isinstance(value, str) and " " in value


def _found(text: str, first: int) -> Iterator[Found]:
    for match in DISCOURAGED.finditer(text):
        yield first + text.count("\n", 0, match.start()), match[0]


def main() -> int:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    readers = {
        in_markdown: documents,
        in_c: [*ROOT.glob("bpf/*.[ch]"), *ROOT.glob("ebpfproxy/bench/**/*.[ch]")],
        in_python: list(ROOT.glob("ebpfproxy/**/*.py")),
    }
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for reader, paths in readers.items()
        for path in sorted(paths)
        for line, word in reader(path.read_text())
    ]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
