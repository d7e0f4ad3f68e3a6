"""The variants of the image: their size, what is in them, and how they get the compiled BPF programs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf.programs import COMPILED
from ebpfproxy.linux import mounts
from ebpfproxy.linux.bpf.object_cache import DAMAGED
from tests.deploy.building import DEFAULT, WITH_BCC, Built
from tests.deploy.installed import Installed
from tests.deploy.test_pod import answers, get, web
from tests.support.kustomize import DEPLOY, REPOSITORY, one

pytestmark = pytest.mark.kernel

_MOST = 150e6  # bytes of the default variant on a node's disk
_MOST_RESIDENT = 80e6  # bytes of an agent with few Services: 61 MB


def test_the_default_variant_is_small_and_has_no_compiler(built_images: dict[str, Built]) -> None:
    made = built_images[DEFAULT]
    assert made.size <= _MOST
    names = {path.name for path in (made.image.root / "usr/lib").rglob("*")}
    assert not [name for name in names if re.match(r"libLLVM|libclang|libbcc", name)]
    assert len(objects(made)) == 1


def test_the_variant_with_bcc_has_a_compiler(built_images: dict[str, Built]) -> None:
    names = {path.name for path in (built_images[WITH_BCC].image.root / "usr/lib").rglob("libbcc*")}
    assert names


def objects(made: Built) -> list[Path]:
    packages = next(made.image.root.glob("opt/ebpfproxy/lib/python3.*/site-packages/ebpfproxy"))
    return list((packages / "objects").iterdir())


def test_the_agent_of_an_image_does_not_compile_and_is_small(
    request: pytest.FixtureRequest, installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    if "machine" in request.node.callspec.id:
        pytest.skip("a checkout compiles once")
    exposed = web(installed)
    agent = installed.start()
    assert answers(installed, exposed) == ["a", "a", "a"]
    assert COMPILED not in agent.log()
    assert DAMAGED not in agent.log()
    status = Path(f"/proc/{installed.pod.pid()}/status").read_text()
    resident = int(re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)[0]) * 1024
    with capsys.disabled():
        print(f"\n  resident: {resident / 1e6:.0f} MB")
    assert resident < _MOST_RESIDENT
    agent.stop()


def test_without_an_object_file_the_variants_differ(
    request: pytest.FixtureRequest, installed: Installed, tmp_path: Path
) -> None:
    """The default variant falls back to another mode. The one with bcc compiles once for each node."""
    variant = request.node.callspec.params["image"]
    if variant == "machine":
        pytest.skip("only for images")
    hide_objects(installed)
    installed.paths["/var/cache/ebpfproxy"] = tmp_path
    cgroup = installed.cluster.lab.cgroup.relative_to(mounts.cgroup2_root())
    cleaned = installed.run("cleanup", f"--cgroup-root=/host/sys/fs/cgroup/{cgroup}")
    assert cleaned.returncode == 0, cleaned.stderr  # programs that are pinned need no object file
    exposed = web(installed)
    agent = installed.start()
    assert answers(installed, exposed) == ["a", "a", "a"]
    assert get(installed, "/proxyMode", 10249) == ("nftables" if variant == DEFAULT else "ebpf")
    if variant == DEFAULT:
        assert "no object file for these BPF programs" in agent.log()
        assert "use the image variant with bcc" in agent.log()
        assert COMPILED not in agent.log()
    else:
        assert COMPILED in agent.log()
        assert list((tmp_path / "objects").glob("*.bpf"))
    agent.stop()


def hide_objects(installed: Installed) -> None:
    """Mount an empty folder over the object files, and the cache of deploy/with-bcc."""
    spec = one(installed.objects, "DaemonSet")["spec"]["template"]["spec"]
    root = installed.image.root
    (folder,) = root.glob("opt/ebpfproxy/lib/python3.*/site-packages/ebpfproxy/objects")
    empty = "/var/empty-objects"
    installed.paths[empty] = Path(installed.cluster.lab.folder) / "empty"
    installed.paths[empty].mkdir(exist_ok=True)
    added = {"objects": (empty, f"/{folder.relative_to(root)}"), "cache": ("/var/cache/ebpfproxy",) * 2}
    for name, (path, where) in added.items():
        spec["volumes"].append({"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}})
        spec["containers"][0]["volumeMounts"].append({"name": name, "mountPath": where})


def test_a_build_without_object_file_says_what_to_do(tmp_path: Path) -> None:
    """As the build stage of the default variant, which has no bcc."""
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc/__init__.py").write_text("raise ImportError('none')")
    command = (
        "from pathlib import Path; from ebpfproxy.linux.bpf import object_cache; import sys\n"
        "object_cache.SHIPPED = object_cache.FOLDER = Path('/nonexistent')\n"
        "from ebpfproxy.cli import main\n"
        f"sys.exit(main(['compile', '--output={tmp_path}/objects']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4
    assert "no object file for these BPF programs" in done.stderr
    assert not (tmp_path / "objects").exists()
    assert "make objects" in (DEPLOY / "Dockerfile").read_text()
