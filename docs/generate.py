"""Writes the parts of the documentation that come from code: `make docs-generate`.

A test fails if a file is out of date.
"""

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.backends.selection import MODES
from ebpfproxy.config.option import Group, Option, declared_by
from ebpfproxy.config.settings import Config
from ebpfproxy.errors import EXIT_CODES
from ebpfproxy.model.balancing import Algorithm

FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parent / "ebpfproxy"
_CHART = FOLDER.parent / "deploy/helm/generate.py"
HEADER = """# Configuration reference

This page is for operators who look up a flag or a field of the configuration file.
It is generated from `ebpfproxy/config/`; change the help texts there.

- Flags belong to `ebpfproxy run`. Names, meanings and defaults of kube-proxy's flags are kube-proxy's.
- A **field** belongs to the KubeProxyConfiguration that `--config` names.
  If there is a file, flags with a field are ignored, except those marked *over file*.
- `ebpfproxy run --write-config-to=FILE` writes the effective configuration and exits.
- A bad flag or field ends the agent with exit code 2 and one line that names it.
"""


def configuration() -> str:
    """The text of docs/configuration.md: one table for each heading of the help."""
    options = declared_by(Config).values()
    return HEADER + "".join(
        _table(group, [each for each in options if each.group is group]) for group in Group
    )


def _table(group: Group, options: list[Option]) -> str:
    rows = [f"\n## {group.value}\n\n| flag | default | meaning | field |\n|---|---|---|---|\n"]
    for each in options:
        default = f"`{each.default}`" if each.default else ""
        fields = ", ".join(f"`{field}`" for field in each.fields) + (" (over file)" if each.over_file else "")
        flags = ", ".join(f"`{flag}`" for flag in each.flags)
        rows.append(f"| {flags} | {default} | {_escaped(each.help)} | {fields} |\n")
    return "".join(rows)


MESSAGES = """# Log messages

This page is for operators who search the log or set alerts on it.
It is generated from the constants in `ebpfproxy/`; change the messages and their meanings there.

A line has the time, the level, the message and `key=value` pairs. An event always has the same message.

| message | level | meaning | code |
|---|---|---|---|
"""
_LEVELS = ("debug", "info", "warning", "error")


def log_messages() -> str:
    """The text of docs/log-messages.md: a row for each message that is logged, sorted."""
    rows: dict[tuple[str, str], tuple[set[str], str]] = {}
    known = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    defined = {path: dict(_constants(tree)) for path, tree in known.items()}
    for path, tree in known.items():
        for level, name in _logged(tree):
            where = path if name in defined[path] else _imported_from(tree, name)
            text, meaning = defined[where][name]
            code = str(where.relative_to(PACKAGE.parent))
            rows.setdefault((text, code), (set(), meaning))[0].add(level)
    return MESSAGES + "".join(
        f"| `{text}` | {', '.join(sorted(levels, key=_LEVELS.index))} | {_escaped(meaning)} "
        f"| [{Path(code).name}](../{code}) |\n"
        for (text, code), (levels, meaning) in sorted(rows.items())
    )


def _logged(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Level and constant of each call of the logger, and of each Remark, which is logged as a warning."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="log" | "_log"), attr=level),
                args=[ast.Name(id=name), *_],
            ) if level in _LEVELS:
                yield level, name
            case ast.Call(func=ast.Name(id="Remark"), args=[ast.Name(id=name), *_]):
                yield "warning", name


def _constants(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each text constant of a module that has a docstring: its name, its value, and that."""
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        match node, after:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))),
                ast.Expr(value=ast.Constant(value=str(meaning))),
            ):
                yield name, (text, " ".join(meaning.split()))


def _imported_from(tree: ast.Module, name: str) -> Path:
    """The module that a constant is imported from. Raises KeyError where it is not."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in [each.name for each in node.names]:
            return PACKAGE.parent / f"{(node.module or '').replace('.', '/')}.py"
    raise KeyError(name)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


EXIT_CODE_PAGE = """# Exit codes

This page is for operators and scripts that act on the exit code of a command.
It is generated from `ebpfproxy/errors.py`; change the meanings there.

| code | meaning | typical cause |
|---|---|---|
"""
ERRORS = """
An error is one line on standard error. If there is a remedy, a second line begins with `hint:`.
An agent that ends because of an error logs it instead, with the values `error` and `hint`.
"""


def exit_codes() -> str:
    """The text of docs/exit-codes.md: a row for each exit code."""
    rows = (f"| {each.code} | {each.meaning} | {each.causes} |\n" for each in EXIT_CODES)
    return EXIT_CODE_PAGE + "".join(rows) + ERRORS


BEGIN, END = "<!-- generated by docs/generate.py -->\n", "<!-- end -->\n"


def load_balancing() -> str:
    """The text of docs/load-balancing.md, with the table of what each mode supports."""
    before, _, rest = (FOLDER / "load-balancing.md").read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{_support_table()}{END}{after}"


def _support_table() -> str:
    """A column for each mode, and a row for each request."""
    of = [each.balancing for each in MODES]
    rows = {f"`{each.value}`": [each in support.algorithms for support in of] for each in Algorithm}
    rows["weights other than 0"] = [support.weights for support in of]
    rows["slow start"] = [bool(support.slow_start) for support in of]
    rows["IPVS forwarding other than `nat`"] = [support.forwarding for support in of]
    rows["direct server return (`dsr`)"] = [support.dsr for support in of]
    head = "".join(f" {each.name} |" for each in MODES)
    text = f"| |{head}\n|---|{'---|' * len(MODES)}\n"
    for name, honored in rows.items():
        text += f"| {name} |{''.join(' yes |' if each else ' no |' for each in honored)}\n"
    return text


def files() -> dict[Path, str]:
    """The text of each generated file, by path."""
    images: dict[Path, str] = runpy.run_path(str(FOLDER / "images" / "paths.py"))["files"]()
    others = (FOLDER / "metrics_reference.py", FOLDER.parent / "deploy/monitoring/generate.py", _CHART)
    elsewhere: dict[Path, str] = {}
    for script in others:
        elsewhere |= runpy.run_path(str(script))["files"]()
    pages = {
        "configuration.md": configuration(),
        "exit-codes.md": exit_codes(),
        "log-messages.md": log_messages(),
        "load-balancing.md": load_balancing(),
    }
    return {FOLDER / name: text for name, text in pages.items()} | images | elsewhere


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
