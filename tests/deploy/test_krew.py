"""The manifest of the plugin for krew, by krew's rules for plugins, and what an installation gives.

The rules: ValidatePlugin() in internal/index/validation/validate.go, and the types in pkg/index/types.go.
"""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebpfproxy import __version__
from tests.support.kustomize import DEPLOY

REPOSITORY = "example/ebpfproxy"
_SEMANTIC = re.compile(r"v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?")
_FIELDS = {
    "spec": {"version", "shortDescription", "description", "caveats", "homepage", "platforms"},
    "platform": {"uri", "sha256", "selector", "files", "license", "bin"},
}


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    program = [sys.executable, str(DEPLOY / "kubectl" / "package.py"), REPOSITORY, str(tmp_path)]
    subprocess.run(program, check=True, timeout=60)
    return tmp_path


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "ebpfproxy.yaml").read_text())
    return found


def test_krew_accepts_the_manifest(packaged: Path) -> None:
    found = manifest(packaged)
    assert found["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert found["kind"] == "Plugin"
    assert found["metadata"] == {"name": "ebpfproxy"}
    assert "${" not in (packaged / "ebpfproxy.yaml").read_text()
    spec = found["spec"]
    assert spec.keys() <= _FIELDS["spec"]
    assert spec["shortDescription"]
    assert "\n" not in spec["shortDescription"]
    assert _SEMANTIC.fullmatch(spec["version"])
    assert spec["platforms"]
    for platform in spec["platforms"]:
        assert platform.keys() <= _FIELDS["platform"]
        assert re.fullmatch(r"[a-f0-9]{64}", platform["sha256"])
        assert platform["uri"].startswith("https://")
        assert platform["files"]
        assert all(each["from"] and each["to"] for each in platform["files"])
        expressions = platform["selector"]["matchExpressions"]
        assert expressions
        assert {each["key"] for each in expressions} <= {"os", "arch"}


def test_the_manifest_names_the_archive_of_this_version(packaged: Path) -> None:
    (platform,) = manifest(packaged)["spec"]["platforms"]
    archive = packaged / platform["uri"].rpartition("/")[2]
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert platform["uri"].split("/")[-2] == f"v{__version__}" == manifest(packaged)["spec"]["version"]


def test_what_krew_installs_runs(packaged: Path, tmp_path: Path) -> None:
    """It extracts the archive with its permissions, copies `files`, and links `bin`."""
    (platform,) = manifest(packaged)["spec"]["platforms"]
    installed = tmp_path / "installed"
    installed.mkdir()
    with zipfile.ZipFile(packaged / "kubectl-ebpfproxy.zip") as archive:
        entries = {each.filename: each for each in archive.infolist()}
        for operation in platform["files"]:
            assert operation["to"] == "."
            entry = entries[operation["from"]]
            target = installed / entry.filename
            target.write_bytes(archive.read(entry))
            target.chmod(entry.external_attr >> 16 & 0o777)
    assert "LICENSE" in os.listdir(installed)  # noqa: PTH208
    done = subprocess.run(
        [installed / platform["bin"], "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "kubectl ebpfproxy COMMAND NODE" in done.stdout


def test_the_same_sources_give_the_same_archive(packaged: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    program = [sys.executable, str(DEPLOY / "kubectl" / "package.py"), REPOSITORY, str(again)]
    subprocess.run(program, check=True, timeout=60)
    for name in ("kubectl-ebpfproxy.zip", "ebpfproxy.yaml"):
        assert (again / name).read_bytes() == (packaged / name).read_bytes()
