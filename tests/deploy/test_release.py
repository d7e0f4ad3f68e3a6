"""The files of a release: two builds give the same bytes, and they contain what they should."""

import hashlib
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebpfproxy import __version__
from tests.support import chart
from tests.support.kustomize import DEPLOY, REPOSITORY, one

NAME = "Example/ebpfproxy"
IMAGE = "ghcr.io/example/ebpfproxy"
COMPILE = """
import sys
from pathlib import Path
from ebpfproxy.linux.bpf import object_cache
object_cache.SHIPPED = object_cache.FOLDER = Path(sys.argv[1], "none")
from ebpfproxy.cli import main
sys.exit(main(["compile", f"--output={sys.argv[1]}/objects"]))
"""
"""Compiles the BPF programs again, although this machine has an object file."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, those of `deploy/release.py`."""
    folder = tmp_path_factory.mktemp("release") / "dist"
    subprocess.run(release(DEPLOY, folder), check=True, capture_output=True, timeout=100)
    return {path.name: path for path in folder.iterdir()}


def release(deploy: Path, folder: Path) -> list[str]:
    return [sys.executable, str(deploy / "release.py"), NAME, str(folder)]


def test_a_build_elsewhere_and_later_gives_the_same_files(files: dict[str, Path], tmp_path: Path) -> None:
    """All files: wheel, source distribution, chart, manifests and plugin."""
    copy = tmp_path / "copy"
    copy.mkdir()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    for name in (*project["sdist"]["include"], "pyproject.toml", ".gitignore"):
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, copy / name, True, ignored, copied)
        else:
            copied(REPOSITORY / name, copy / name)
    subprocess.run(release(copy / "deploy", tmp_path / "dist"), check=True, capture_output=True, timeout=100)
    again = {path.name: digest(path) for path in (tmp_path / "dist").iterdir()}
    assert again == {name: digest(path) for name, path in files.items()}


def copied(source: str | Path, target: str | Path) -> None:
    """With the mode, but with the present time."""
    shutil.copy(source, target)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.kernel
@pytest.mark.long
def test_two_compilations_of_the_bpf_programs_give_the_same_file(tmp_path: Path) -> None:
    """In two copies, so that no path of the source is part of the file."""
    found = []
    for name in ("a", "b"):
        copy = tmp_path / name
        for part in ("ebpfproxy", "bpf"):
            shutil.copytree(
                REPOSITORY / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "objects")
            )
        subprocess.run(
            [sys.executable, "-c", COMPILE, copy], cwd=copy, check=True, capture_output=True, timeout=100
        )
        (made,) = (copy / "objects").iterdir()
        found.append((made.name, digest(made)))
    assert found[0] == found[1]


def test_the_sums_are_of_all_files(files: dict[str, Path]) -> None:
    assert set(files) == {
        f"ebpfproxy-{__version__}-py3-none-any.whl",
        f"ebpfproxy-{__version__}.tar.gz",
        f"ebpfproxy-chart-{__version__}.tgz",
        "ebpfproxy.yaml",
        "krew-ebpfproxy.yaml",
        "kubectl-ebpfproxy.zip",
        "SHA256SUMS",
    }
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"],
        cwd=files["SHA256SUMS"].parent,
        check=False,
    )
    assert done.returncode == 0
    assert len(files["SHA256SUMS"].read_text().splitlines()) == len(files) - 1


def test_the_wheel_has_the_sources_of_the_bpf_programs(files: dict[str, Path]) -> None:
    with zipfile.ZipFile(files[f"ebpfproxy-{__version__}-py3-none-any.whl"]) as wheel:
        names = wheel.namelist()
    assert {f"ebpfproxy/bpf/{path.name}" for path in (REPOSITORY / "bpf").glob("*.[ch]")} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "deploy/"))]


def test_the_chart_has_its_image_and_metadata_for_artifact_hub(files: dict[str, Path]) -> None:
    content: dict[str, bytes] = {}
    with tarfile.open(files[f"ebpfproxy-chart-{__version__}.tgz"]) as archive:
        for entry in archive:
            opened = archive.extractfile(entry)
            assert opened
            content[entry.name] = opened.read()
    sources = (path for path in chart.CHART.rglob("*") if path.is_file())
    assert set(content) == {f"ebpfproxy/{path.relative_to(chart.CHART)}" for path in sources}
    values, metadata = (yaml.safe_load(content[f"ebpfproxy/{name}.yaml"]) for name in ("values", "Chart"))
    assert values["image"]["repository"] == IMAGE
    assert metadata["version"] == metadata["appVersion"] == __version__
    assert metadata["home"] == f"https://github.com/{NAME}"
    annotations = {
        name: yaml.safe_load(text)
        for name, text in metadata["annotations"].items()
        if name.startswith("artifacthub.io/")
    }
    assert annotations["artifacthub.io/category"] == "networking"
    assert annotations["artifacthub.io/license"] == "Apache-2.0"
    (image,) = annotations["artifacthub.io/images"]
    assert image["image"] == f"{IMAGE}:{__version__}"
    assert image["platforms"] == ["linux/amd64", "linux/arm64"]


def test_the_manifests_name_the_image(files: dict[str, Path]) -> None:
    objects = [each for each in yaml.safe_load_all(files["ebpfproxy.yaml"].read_text()) if each]
    spec: dict[str, Any] = one(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == f"{IMAGE}:{__version__}"


def test_the_metadata_of_the_charts_repository_has_known_fields() -> None:
    found = yaml.safe_load((DEPLOY / "helm/artifacthub-repo.yml").read_text())
    assert found.keys() <= {"repositoryID", "owners", "ignore"}


def test_the_image_and_a_release_build_the_wheel_with_the_same_hatchling() -> None:
    pins = [
        re.findall(r"hatchling==([\d.]+)", (REPOSITORY / name).read_text())
        for name in ("pyproject.toml", "deploy/build-requirements.txt")
    ]
    assert pins[0] == pins[1]
    assert len(pins[0]) == 1


def test_a_default_that_is_gone_from_the_chart_is_an_error() -> None:
    replace = runpy.run_path(str(DEPLOY / "release.py"))["_replace"]
    with pytest.raises(ValueError, match="not once"):
        replace("image:\n", '  repository: ""', "a")
