"""The mutation operators for Python, by the syntax tree. Only the bodies of functions are mutated.

Left out is what no test should depend on: log messages, the texts of exceptions, `__str__`, `__repr__`,
assertions, annotations and docstrings.
"""

import ast
import itertools
import re
from collections.abc import Iterator

from tests.mutations.edit import Edit

_COMPARISONS = {"==": "!=", "<": "<=", ">": ">=", "in": "not in", "is": "is not"}
_COMPARISONS |= {value: key for key, value in _COMPARISONS.items()}
_COMPARISON = re.compile(r"[=!<>]=|<|>|\b(?:not\s+in|in|is\s+not|is)\b")
_AND_OR = re.compile(r"\b(?:and|or)\b")
_RESULTS = {
    "bool": "not ({})", "int": "0", "str": '""', "list": "[]", "dict": "{{}}", "set": "set()", "tuple": "()",
    "Sequence": "()", "Collection": "()", "Iterable": "()", "Mapping": "{{}}", "frozenset": "frozenset()",
}  # fmt: skip
"""What a function returns instead, by the annotation of its result."""
_LEFT_OUT = (ast.Assert, ast.Raise, ast.JoinedStr, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LOGS = re.compile(r"(?:self\.)?_?log\.\w+\(")


def edits(text: str) -> Iterator[Edit]:
    yield from _Finder(text).in_scope(ast.parse(text), "")


class _Finder:
    def __init__(self, text: str) -> None:
        self._text = text
        lines = text.split("\n")
        self._lines = [line.encode() for line in lines]
        self._starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
        self._function = ""
        self._annotation = ""

    def in_scope(self, node: ast.AST, prefix: str) -> Iterator[Edit]:
        """Those of all functions in a module, class, function or statement."""
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name += f".{child.name}" if prefix else child.name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name in ("__str__", "__repr__"):
                    continue
                self._function = name
                self._annotation = ast.unparse(child.returns) if child.returns else ""
                for statement in child.body:
                    yield from self._in_body(statement)
            yield from self.in_scope(child, name)

    def _in_body(self, node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, _LEFT_OUT) or (isinstance(node, ast.Call) and _LOGS.match(ast.unparse(node))):
            return
        yield from self._of(node)
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.AnnAssign) and child is node.annotation):
                yield from self._in_body(child)

    def _of(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare():
                for start, end in self._gaps([node.left, *node.comparators]):
                    if found := _COMPARISON.search(self._text, start, end):
                        other = _COMPARISONS[" ".join(found[0].split())]
                        yield self._edit("comparison", *found.span(), other)
            case ast.BoolOp():
                for start, end in self._gaps(node.values):
                    if found := _AND_OR.search(self._text, start, end):
                        yield self._edit("and-or", *found.span(), "or" if found[0] == "and" else "and")
            case ast.UnaryOp(op=ast.Not()):
                start = self._start(node)
                yield self._edit("not", start, start + len("not "), "")
            case ast.If(test=test) | ast.IfExp(test=test):
                yield from self._negated(test)
            case ast.comprehension():
                for test in node.ifs:
                    yield from self._negated(test)
            case ast.Constant(value=bool(value)):
                yield self._replaced("boolean", node, str(not value))
            case ast.Constant(value=int(value)):
                yield self._replaced("constant", node, str(value + 1))
            case ast.Return(value=ast.expr() as value):
                yield from self._returned(value)
            case ast.AugAssign() | ast.Expr(value=ast.Call()):
                if not _LOGS.match(ast.unparse(node)):
                    yield self._replaced("statement", node, "pass")

    def _gaps(self, operands: list[ast.expr]) -> Iterator[tuple[int, int]]:
        """The text between operands, which has the operator."""
        for left, right in itertools.pairwise(operands):
            yield self._end(left), self._start(right)

    def _negated(self, test: ast.expr) -> Iterator[Edit]:
        """A condition without an operator that another edit changes."""
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            yield self._replaced("condition", test, f"not ({self._source(test)})")

    def _returned(self, value: ast.expr) -> Iterator[Edit]:
        result = _RESULTS.get(self._annotation.partition("[")[0])
        if self._annotation.endswith("| None"):
            result = "None"
        if self._annotation == "bool" and isinstance(value, ast.Compare | ast.UnaryOp | ast.Constant):
            result = None  # another edit has the same effect
        if result and result.format("") != self._source(value):
            yield self._replaced("return", value, result.format(self._source(value)))

    def _replaced(self, operator: str, node: ast.expr | ast.stmt, replacement: str) -> Edit:
        return self._edit(operator, self._start(node), self._end(node), replacement)

    def _edit(self, operator: str, start: int, end: int, replacement: str) -> Edit:
        return Edit(self._function, operator, start, end, replacement)

    def _source(self, node: ast.expr) -> str:
        return self._text[self._start(node) : self._end(node)]

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """`column` counts bytes of UTF-8, as the syntax tree does."""
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())
