"""Comparisons of a saved dump with the cluster, without the kernel that it was read from."""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel.cluster import Cluster, Exposed, elsewhere, terminating
from tests.support.confined import as_nobody

pytestmark = [pytest.mark.kernel, pytest.mark.backends("ebpf")]


class Saved:
    """The dump of a node with Services of all kinds, and the manifests that it serves."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self.file = folder / "dump.json"
        self.manifests = folder / "manifests"
        shutil.copytree(cluster.folder, self.manifests)
        name = f"--hostname-override={cluster.lab.node_name}"
        self.file.write_text(cluster.ebpfproxy("dump", "all", "-o=json", name).stdout)
        for each in (folder, *folder.rglob("*")):
            each.chmod(0o755)

    def run(self, *command: str) -> tuple[int, str]:
        """Exit code and output of a command that cannot read the kernel."""
        flags = (f"--from-dump={self.file}", f"--manifests={self.manifests}", "-o=json")
        done = self._cluster.lab.outside.run(
            [*as_nobody(), sys.executable, "-m", "ebpfproxy", command[0], *flags, *command[1:]], check=False
        )
        assert not done.stderr or "cannot" in done.stderr, done.stderr
        return done.returncode, done.stdout or done.stderr


@pytest.fixture
def web(cluster: Cluster) -> Exposed:
    cluster.service(sessionAffinity="ClientIP").to(cluster.c)
    cluster.service().to()
    slow = cluster.service()
    slow.annotations = {"ebpfproxy/slow-start": "30s"}
    slow.to(cluster.a)
    cluster.service(node_port=True, internalTrafficPolicy="Local", type="NodePort").to(cluster.a)
    cluster.service().to(cluster.b, terminating(cluster.c))
    balanced = cluster.service(type="LoadBalancer", loadBalancerSourceRanges=["10.0.0.0/8", "fd00::/8"])
    balanced.status = {"loadBalancer": {"ingress": [{"ip": "192.0.2.20"}, {"ip": "2001:db8::20"}]}}
    balanced.to(cluster.b)
    return cluster.service(node_port=True, type="NodePort", externalTrafficPolicy="Local").to(
        cluster.a, elsewhere(cluster.b)
    )


@pytest.fixture
def saved(cluster: Cluster, web: Exposed) -> Iterator[Saved]:
    """In a folder that other users can enter; pytest's own cannot be entered by them."""
    cluster.lab.folder.chmod(0o755)
    with tempfile.TemporaryDirectory(dir=cluster.lab.folder) as folder:
        yield Saved(cluster, Path(folder))


def test_a_dump_of_a_node_in_sync_has_no_differences(saved: Saved) -> None:
    code, output = saved.run("verify")
    found = json.loads(output)
    assert found["differences"] == [], "\n".join(map(str, found["differences"]))
    assert found["compared"] >= 24
    assert code == 0
    assert saved.run("dump", "--diff")[0] == 0


CHANGES: dict[str, Callable[[str], str]] = {
    "endpoint": lambda text: text.replace("10.244.1.2", "10.244.1.99"),
    "policy": lambda text: text.replace("externalTrafficPolicy: Local", "externalTrafficPolicy: Cluster"),
    "affinity": lambda text: text.replace("type: NodePort", "type: NodePort\n  sessionAffinity: ClientIP"),
    "port": lambda text: text.replace("port: 80\n", "port: 88\n"),
}


@pytest.mark.same_for("change")
@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_named(saved: Saved, web: Exposed, change: str) -> None:
    file = saved.manifests / f"{web.name}.yaml"
    text = CHANGES[change](file.read_text())
    assert text != file.read_text()
    file.write_text(text)
    code, output = saved.run("verify")
    keys = {each["key"] for each in json.loads(output)["differences"]}
    assert keys
    assert all(key.startswith(f"default/{web.name}:") for key in keys), keys
    assert code == 1
    code, output = saved.run("dump", "--diff")
    assert {each["object"] for each in json.loads(output)["objects"]} == keys
    assert code == 1
    code, output = saved.run("dump", "services", "--drift")
    marked = {row["service"] for row in json.loads(output) if row["drifted"]}
    assert marked <= {key.split("/TCP")[0].split("/UDP")[0] for key in keys}
    assert marked


def test_services_that_only_one_side_has_are_named(saved: Saved, web: Exposed) -> None:
    file = saved.manifests / f"{web.name}.yaml"
    text = file.read_text()
    file.unlink()
    (saved.manifests / "new.yaml").write_text(text.replace(web.name, "added").replace(web.v4, "10.96.9.9"))
    found = json.loads(saved.run("verify")[1])["differences"]
    states = {(each["key"].partition(":")[0], each["state"]) for each in found}
    assert {(f"default/{web.name}", "unexpected"), ("default/added", "missing")} <= states


def test_a_dump_of_a_part_is_rejected(cluster: Cluster, saved: Saved, web: Exposed) -> None:
    part = cluster.ebpfproxy("dump", "all", "-o=json", f"--service=default/{web.name}").stdout
    saved.file.write_text(part)
    code, output = saved.run("verify")
    assert code == 2
    assert f"--service=default/{web.name}" in output


def test_no_connection_is_made_for_a_dump(saved: Saved) -> None:
    code, output = saved.run("verify", "--canary")
    assert code == 2
    assert "cannot combine --canary with --from-dump" in output
