"""The DaemonSet's pod on a lab's node, made of this machine's files and, with --image, also of the image."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.lab import Lab
from tests.deploy.building import DEFAULT, MACHINE, WITH_BCC, Builder, Built, builder
from tests.deploy.installed import Installed
from tests.kernel.cluster import Cluster
from tests.support.kustomize import DEPLOY, REPOSITORY, render
from tests.support.missing import need
from tests.support.oci import Image


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "image" in metafunc.fixturenames:
        kinds = [MACHINE, DEFAULT, WITH_BCC] if metafunc.config.getoption("--image") else [MACHINE]
        metafunc.parametrize("image", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def _builder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    if not request.config.getoption("--image"):
        pytest.skip("the image is built by make test-image")
    need("buildah")
    need("debootstrap")
    with builder(tmp_path_factory.mktemp("image")) as made:
        yield made


@pytest.fixture(scope="session")
def built_images(_builder: Builder) -> dict[str, Built]:
    """The variants of deploy/Dockerfile. This takes minutes and downloads some hundred megabytes."""
    return {variant: _builder.build(variant) for variant in (DEFAULT, WITH_BCC)}


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest) -> Image:
    """The root file system of pods: this machine's files with this checkout, or the image."""
    need("crun")
    if request.param != MACHINE:
        made: dict[str, Built] = request.getfixturevalue("built_images")
        return made[request.param].image
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    also = {REPOSITORY, Path(sys.prefix)}
    return Image(Path("/"), [sys.executable, "-m", "ebpfproxy"], environment, sorted(also))


@pytest.fixture(scope="module")
def _node(image: Image) -> Iterator[Cluster]:
    """A separate node for each kind of image, so that each compiles the programs once."""
    with Lab("test-deploy", 71) as lab:
        yield Cluster(lab)


@pytest.fixture
def installed(_node: Cluster, image: Image) -> Iterator[Installed]:
    """A node without an agent. Kernel state of previous agents still exists."""
    made = Installed(_node, image, render(DEPLOY / "base"))
    try:
        yield made
    finally:
        made.end()
