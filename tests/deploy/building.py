"""Builds the unchanged deploy/Dockerfile on a base from debootstrap, without a container registry.

The base resembles debian:NAME-slim: the packages of debootstrap's smallest variant, and dpkg omits
documentation.
"""

import contextlib
import json
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.kustomize import DEPLOY, REPOSITORY
from tests.support.oci import Image

DOCKERFILE = DEPLOY / "Dockerfile"

_BASE = "localhost/base"
_RESULT = "localhost/ebpfproxy"
DEFAULT, WITH_BCC = "default", "with-bcc"
"""The variants of the image: targets of the Dockerfile."""
MACHINE = "machine"
"""Instead of an image: the files of this machine."""
_OMITTED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")
_PATIENCE = 1800  # seconds, for a slow mirror


class Built(NamedTuple):
    """`size`: bytes of all layers on a node's disk. `seconds`: the time for the Dockerfile without its
    base."""

    image: Image
    size: int
    seconds: float


def base_name() -> str:
    """The Dockerfile's default base without its digest: debian:NAME-slim."""
    (name,) = re.findall(r"^FROM (\S+)@sha256:[0-9a-f]{64} AS debian$", DOCKERFILE.read_text(), re.MULTILINE)
    return str(name)


@contextlib.contextmanager
def builder(folder: Path) -> Iterator["Builder"]:
    """Within the block, the base and the object file, from which variants are built. Raises
    CalledProcessError."""
    build = Builder(folder)
    try:
        build.make_base()
        objects = REPOSITORY / "ebpfproxy/objects"  # as `make objects`
        _run(sys.executable, "-m", "ebpfproxy", "compile", f"--output={objects}")
        yield build
    finally:
        build.remove()


class Builder:
    """Builds variants of the image below `folder`, with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._storage = [f"--root={folder}/storage", f"--runroot={folder}/run", "--storage-driver=overlay"]

    def make_base(self) -> None:
        root = self._folder / "base"
        suite = base_name().removeprefix("debian:").removesuffix("-slim")
        _run("debootstrap", "--variant=minbase", suite, str(root))
        excluded = "".join(f"path-exclude /{path}/*\n" for path in _OMITTED)
        (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(excluded)
        _run("sh", "-c", f"rm -rf {root}/var/cache/apt/archives/*.deb {root}/var/lib/apt/lists/*")
        _run("rm", "-rf", *(str(root / path) for path in _OMITTED))
        container = self._buildah("from", "scratch")
        self._buildah("add", "--quiet", container, str(root), "/")
        self._buildah("commit", "--quiet", "--rm", container, _BASE)
        _run("rm", "-rf", str(root))

    def build(self, variant: str) -> Built:
        """The image of a variant with its readable files. Raises CalledProcessError."""
        began = time.monotonic()
        self._make_image(variant)
        return self._result(variant, time.monotonic() - began)

    def _make_image(self, variant: str) -> None:
        """pip in the build trusts the CAs of this machine, which may include a private one for the index."""
        configuration = self._folder / "pip.conf"
        configuration.write_text("[global]\ncert = /etc/pip-ca.pem\n")
        trusted = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
        self._buildah(
            "build",
            "--isolation=chroot",
            "--pull-never",
            f"--from={_BASE}",
            f"--volume={Path(trusted).resolve()}:/etc/pip-ca.pem:ro",
            f"--volume={configuration}:/etc/pip.conf:ro",
            f"--file={DOCKERFILE}",
            "--layers",
            f"--target={variant}",
            f"--tag={_RESULT}:{variant}",
            str(REPOSITORY),
        )

    def _result(self, variant: str, seconds: float) -> Built:
        name = f"{_RESULT}:{variant}"
        inspected = json.loads(self._buildah("inspect", "--type=image", name))
        configuration = inspected["OCIv1"]["config"]
        container = self._buildah("from", "--pull-never", name)
        root = Path(self._buildah("mount", container))
        environment = dict(each.split("=", 1) for each in configuration["Env"])
        return Built(Image(root, configuration["Entrypoint"], environment), _size(root), seconds)

    def remove(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._buildah("umount", "--all")
            self._buildah("rm", "--all")
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("umount", f"{self._folder}/storage/overlay")
        _run("rm", "-rf", str(self._folder))

    def _buildah(self, *arguments: str) -> str:
        return _run("buildah", *self._storage, *arguments)


def _size(root: Path) -> int:
    """The size of all files below `root` in bytes."""
    return int(_run("du", "--summarize", "--bytes", "--one-file-system", str(root)).split()[0])


def _run(*command: str) -> str:
    """The command's output without its last newline. The output of a failed command is added as a note."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE)
    except subprocess.CalledProcessError as failure:
        failure.add_note(f"{failure.stdout}\n{failure.stderr}"[-8000:])
        raise
    return done.stdout.strip()
