"""Writes the files of a release, except images, and prints their SHA-256 digests.

    python deploy/release.py OWNER/REPOSITORY FOLDER

`make release-files` runs it after `make objects`. The same sources and the same tools always give the same
files: their times are constant. The chart and the manifests name the image of OWNER/REPOSITORY.
"""

import gzip
import hashlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/ebpfproxy"
SUMS = "SHA256SUMS"
TIME = 315532800
"""The time of every file in an archive, in seconds since 1970: the first that a zip archive can have."""

_KREW = runpy.run_path(str(ROOT / "deploy/kubectl/package.py"))


def write(repository: str, folder: Path) -> dict[str, str]:
    """Write all files into the empty or new `folder`. Returns their digests by name.

    `repository`: OWNER/NAME on GitHub. Raises CalledProcessError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    image = f"ghcr.io/{repository.lower()}"
    _python_packages(folder)
    _chart(repository, image, folder)
    (folder / "ebpfproxy.yaml").write_text(_manifests(image))
    with tempfile.TemporaryDirectory() as krew:
        _KREW["write"](repository, Path(krew))
        shutil.move(Path(krew, _KREW["ARCHIVE"]), folder)
        shutil.move(Path(krew, _KREW["MANIFEST"]), folder / f"krew-{_KREW['MANIFEST']}")
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in found.items()))
    return found


def _python_packages(folder: Path) -> None:
    """The wheel and the source distribution."""
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder.resolve())]
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(TIME)}
    subprocess.run(build, cwd=ROOT, env=environment, stdout=sys.stderr, check=True)


def _chart(repository: str, image: str, folder: Path) -> None:
    """The chart with the image as the default, and with metadata that depends on the repository."""
    replaced = {
        "values.yaml": lambda text: _replace(text, '  repository: ""', f"  repository: {image}"),
        "Chart.yaml": lambda text: f"{text}{_addresses(repository, image)}",
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(each for each in CHART.rglob("*") if each.is_file()):
            content = path.read_bytes()
            if change := replaced.get(path.name):
                content = change(content.decode()).encode()
            entry = tarfile.TarInfo(f"ebpfproxy/{path.relative_to(CHART)}")
            entry.size, entry.mtime = len(content), TIME
            archive.addfile(entry, io.BytesIO(content))
    target = folder / f"ebpfproxy-chart-{_KREW['version']()}.tgz"
    target.write_bytes(gzip.compress(packed.getvalue(), mtime=TIME))


def _replace(text: str, old: str, new: str) -> str:
    """Raises ValueError if `old` is not exactly one line of the text."""
    changed, count = re.subn(rf"^{re.escape(old)}$", new, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"not once: {old}")
    return changed


def _addresses(repository: str, image: str) -> str:
    """The last lines of Chart.yaml, the first of which belong to its `annotations`."""
    home = f"https://github.com/{repository}"
    return f"""\
  artifacthub.io/images: |
    - name: ebpfproxy
      image: {image}:{_KREW["version"]()}
      platforms: [linux/amd64, linux/arm64]
  artifacthub.io/links: |
    - name: support
      url: {home}/issues
home: {home}
sources: [{home}]
"""


def _manifests(image: str) -> str:
    """deploy/base with the image of this version. The API server's address remains to be filled in."""
    kubectl = Path(sys.executable).with_name("kubectl")
    with tempfile.TemporaryDirectory() as overlay:
        shutil.copytree(ROOT / "deploy/base", Path(overlay, "base"))
        Path(overlay, "kustomization.yaml").write_text(
            "resources: [base]\n"
            f"images: [{{name: ebpfproxy, newName: {image}, newTag: {_KREW['version']()}}}]\n"
        )
        build = [kubectl if kubectl.exists() else "kubectl", "kustomize", overlay]
        return subprocess.run(build, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    digests = write(sys.argv[1], Path(sys.argv[2]))
    for path in (ROOT / "ebpfproxy/objects").glob("*.bpf"):  # they are in the wheel and in the image
        digests[str(path.relative_to(ROOT))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for name, digest in digests.items():
        sys.stdout.write(f"{digest}  {name}\n")
