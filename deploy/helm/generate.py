"""The page README.md of the chart: a table of its values, from values.yaml and the comments there.

`make docs-generate` writes it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "ebpfproxy"
_KEY = re.compile(r"^( *)([A-Za-z]+):")
_HEADER = """# The Helm chart of ebpfproxy

This page is for operators who install ebpfproxy with Helm. It is generated from `values.yaml`; change the comments there.

```sh
helm install ebpfproxy deploy/helm/ebpfproxy --namespace kube-system \\
  --set image.repository=registry.example/ebpfproxy --set apiServer.host=192.0.2.1
```

[examples](../examples) has values for kubeadm, kind, k3s and each variant. The chart renders the same objects as [deploy/base](../../base) and its components. [Install](../../../docs/install.md) has all steps, and [deploy/README.md](../../README.md) explains each permission.

| value | default | meaning |
|---|---|---|
"""  # noqa: E501


def documented() -> dict[str, str]:
    """The comment of each value, by its path with dots. A value without its own comment is missing."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
        elif match := _KEY.match(line):
            indent = len(match[1])
            path = [each for each in path if each[0] < indent] + [(indent, match[2])]
            if comment:
                found[".".join(name for _, name in path)] = " ".join(comment)
            comment = []
        else:
            comment = []
    return found


def leaves(value: dict[str, Any], comments: dict[str, str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each documented value, or else each value that is no mapping, with its default."""
    for key, each in value.items():
        path = f"{prefix}{key}"
        if path not in comments and isinstance(each, dict):
            yield from leaves(each, comments, f"{path}.")
        else:
            yield path, each


def files() -> dict[Path, str]:
    """The text of each generated file, by path."""
    comments = documented()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = "".join(
        f"| `{path}` | `{json.dumps(value)}` | {comments[path]} |\n"
        for path, value in leaves(values, comments)
    )
    return {CHART / "README.md": _HEADER + rows}
