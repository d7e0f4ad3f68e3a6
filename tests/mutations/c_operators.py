"""The mutation operators for the C programs, by patterns. They rely on the style that clang-format enforces.

Only the bodies of functions are mutated: neither comments, strings and preprocessor lines, nor assertions.
"""

import re
from collections.abc import Iterator

from tests.mutations.edit import Edit

_NO_CODE = re.compile(
    r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'|_Static_assert\([^;]*;"
    r"|^[ \t]*#(?:/\*.*?\*/|\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
_FUNCTION = re.compile(r"^(\w[^;{}]*?)\b(\w+)\([^;{}]*\)\n\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_SWAPS = {"==": "!=", "<": "<=", ">": ">=", "&&": "||", "+": "-", "true": "false"}
_SWAPS |= {value: key for key, value in _SWAPS.items()}
_PATTERNS = {
    "comparison": re.compile(r"(?<=[\w)\]] )(?:[=!<>]=|<|>)(?=\s)"),
    "and-or": re.compile(r"&&|\|\|"),
    "not": re.compile(r"!(?!=)"),
    "boolean": re.compile(r"\b(?:true|false)\b"),
    "constant": re.compile(r"\b(?:0[xX][0-9a-fA-F]+|\d+)(?=[uUlL]*\b)"),
    "arithmetic": re.compile(r"(?<=[\w)\]] )[+-](?=\s|= )"),
    "return": re.compile(r"(?<=\breturn )(?!true|false)[^;]+(?=;)"),
    "statement": re.compile(r"(?<=\t)(?:[\w.*&()\[\]>-]+ [-+*/|&^]?=\s[^;{}]+|\w[\w.]*\([^;{}]*\))(?=;)"),
}
_STATEMENT_BEFORE = re.compile(r"(?:[;:{})]|\belse)\s*\Z")
_IF = re.compile(r"\bif \(")
_HAS_OPERATOR = re.compile(r"^!|&&|\|\||[=!<>]=| [<>] ")


def edits(text: str) -> Iterator[Edit]:
    code = _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for function in _FUNCTION.finditer(code):
        head, name = function[1], function[2]
        for operator, pattern in _PATTERNS.items():
            if operator == "return" and not re.search(r"\bbool\b", head):
                continue
            for found in pattern.finditer(code, *function.span(3)):
                start, end = found.span()
                if operator != "statement" or _STATEMENT_BEFORE.search(code[:start]):
                    yield Edit(name, operator, start, end, _replacement(operator, text[start:end]))
        for found in _IF.finditer(code, *function.span(3)):
            start, end = found.end(), _closing(code, found.end())
            if not _HAS_OPERATOR.search(code[start:end]):
                yield Edit(name, "condition", start, end, f"!({text[start:end]})")


def _replacement(operator: str, text: str) -> str:
    match operator:
        case "not" | "statement":
            return ""
        case "constant":
            return str(int(text, 0) + 1)
        case "return":
            return f"!({text})"
    return _SWAPS[text]


def _closing(code: str, start: int) -> int:
    """The position of the parenthesis that closes the one before `start`."""
    depth = 1
    for position in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[position], 0)
        if not depth:
            return position
    raise ValueError("a parenthesis is not closed")
