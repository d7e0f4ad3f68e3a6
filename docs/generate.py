"""Writes the parts of the documentation that come from code: `make docs-generate`.

A test fails if a file is out of date.
"""

import runpy
from pathlib import Path

from ebpfproxy.config.option import Group, Option, declared_by
from ebpfproxy.config.settings import Config

FOLDER = Path(__file__).parent
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


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def files() -> dict[Path, str]:
    """The text of each generated file, by path."""
    images: dict[Path, str] = runpy.run_path(str(FOLDER / "images" / "paths.py"))["files"]()
    return {FOLDER / "configuration.md": configuration(), **images}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
