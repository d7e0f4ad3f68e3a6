"""Commands that read the BPF maps of a node: through kubectl ebpfproxy, and for completion in a shell."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.lab import Lab, manifests
from tests.support.documented import PLUGIN, ROOT
from tests.support.kustomize import KUBECTL
from tests.support.pods import PodServer, make_pod
from tests.support.shell import Shell

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def bpffs() -> Iterator[Path]:
    """The maps of an agent that serves dns/dns and web/site."""
    ports = [manifests.port(53, name="dns"), manifests.port(9153, name="metrics")]
    with Lab("test-plugin") as lab:
        folder = lab.folder / "manifests"
        folder.mkdir()
        dns = manifests.service("dns", ["10.96.0.10"], ports)
        site = manifests.service("site", ["10.96.0.11"], [manifests.port(80)])
        dns["metadata"]["namespace"], site["metadata"]["namespace"] = "dns", "web"
        manifests.write(folder / "services.yaml", dns, site)
        lab.agent(folder).await_sync()
        yield lab.bpffs


def test_kubectl_dumps_the_maps_of_the_node(bpffs: Path, tmp_path: Path) -> None:
    program = tmp_path / "ebpfproxy"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m ebpfproxy "$@" --bpffs-root={bpffs}\n'
    )
    program.chmod(0o755)
    with PodServer() as server:
        (tmp_path / ".kube").mkdir()
        server.write_kubeconfig(tmp_path / ".kube" / "config")
        server.pods = [make_pod("pod", "node")]
        server.folders["pod"] = tmp_path
        done = subprocess.run(
            [KUBECTL, "ebpfproxy", "dump", "node", "--service=web/site"],
            env={"HOME": str(tmp_path), "PATH": f"{PLUGIN.parent}:{KUBECTL.parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "10.96.0.11:80" in done.stdout
    assert "10.96.0.10" not in done.stdout


@pytest.mark.parametrize(
    ("typed", "completed"), [("w", "web/site"), ("d", "dns/dns"), ("dns/dns:m", "dns/dns:metrics")]
)
def test_the_shell_completes_services_and_ports(
    bpffs: Path, tmp_path: Path, typed: str, completed: str
) -> None:
    line = f"ebpfproxy dump --bpffs-root={bpffs} --service="
    given = Shell("bash", tmp_path).complete(line + typed)
    assert given == ["dump", f"--bpffs-root={bpffs}", f"--service={completed}"]
