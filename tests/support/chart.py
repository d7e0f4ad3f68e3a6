"""Renders the Helm chart with Helm's own library.

This runs in a process of its own, because the runtime of Go must not be in a process that forks.
"""

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.kustomize import DEPLOY, Object
from tests.support.missing import skip_or_fail

CHART = DEPLOY / "helm/ebpfproxy"
EXAMPLES = DEPLOY / "helm/examples"

_RENDER = """
import json, sys
import helm_python
chart, values = sys.argv[1], json.load(sys.stdin)
with helm_python.Chart.load(chart) as loaded:
    try:
        loaded.validate_schema(values)
        rendered = loaded.render(values, name="any", namespace="kube-system")
    except helm_python.HelmError as failure:
        sys.exit(str(failure))
json.dump(rendered, sys.stdout)
"""
_LINT = """
import json, sys
import helm_python
json.dump(helm_python.lint(sys.argv[1], json.load(sys.stdin), strict=True), sys.stdout)
"""


class Rejected(Exception):
    """Helm rejects the chart or the values."""


def render(values: Mapping[str, Any]) -> list[Object]:
    """The objects of an installation in kube-system. Raises Rejected."""
    texts = json.loads(_run(_RENDER, json.dumps(values)))
    return [
        entry
        for name, text in texts.items()
        if name.endswith(".yaml")
        for entry in yaml.safe_load_all(text)
        if entry
    ]


def notes(values: Mapping[str, Any]) -> str:
    """The text that `helm install` prints."""
    return str(json.loads(_run(_RENDER, json.dumps(values)))["ebpfproxy/templates/NOTES.txt"])


def lint(values: Mapping[str, Any]) -> list[str]:
    """The warnings and errors of `helm lint --strict`."""
    report = json.loads(_run(_LINT, json.dumps(values)))
    found = [each["error"] for each in report["messages"] if each["severity"] > 1]
    return [*found, *(report["errors"] or ())]


@functools.cache
def _run(code: str, values: str) -> str:
    """The JSON that a program prints, given values as JSON. Raises Rejected."""
    if importlib.util.find_spec("helm_python") is None:
        skip_or_fail("no helm-python-sdk, which exists for x86-64 only")
    done = subprocess.run(
        [sys.executable, "-c", code, CHART],
        input=values,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise Rejected(done.stderr.strip())
    return done.stdout


def example(path: Path) -> dict[str, Any]:
    """The values of an example file."""
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    return values
