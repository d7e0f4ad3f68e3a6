"""Packages the plugin of kubectl for krew: an archive, and the manifest that names it.

    python deploy/kubectl/package.py OWNER/REPOSITORY FOLDER

The release workflow attaches both files to the release. The same sources always give the same archive, so
that its checksum can be verified: the times in it are constant, and nothing is compressed.
"""

import hashlib
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_name("krew.yaml")
ARCHIVE = "kubectl-ebpfproxy.zip"
MANIFEST = "ebpfproxy.yaml"
"""Its name is that of the plugin, as krew requires."""

_FILES = {
    "kubectl-ebpfproxy": (ROOT / "deploy/kubectl/kubectl-ebpfproxy", 0o755),
    "LICENSE": (ROOT / "LICENSE", 0o644),
}
"""The source and the mode of each file in the archive."""
_TIME = (1980, 1, 1, 0, 0, 0)
_UNIX = 3  # the system on which permissions have the meaning of Unix


def version() -> str:
    """Return the version of this checkout."""
    found = re.search(r'__version__ = "(.+)"', (ROOT / "ebpfproxy/__init__.py").read_text())
    assert found
    return found[1]


def write(repository: str, folder: Path) -> None:
    """Write the archive and the manifest into `folder`. `repository`: OWNER/NAME on GitHub."""
    archive = folder / ARCHIVE
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as opened:
        for name, (source, mode) in _FILES.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.create_system, entry.external_attr = _UNIX, (0o100000 | mode) << 16
            opened.writestr(entry, source.read_bytes())
    values = {
        "REPOSITORY": repository,
        "VERSION": f"v{version()}",
        "SHA256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }
    text = TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    (folder / MANIFEST).write_text(text)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
