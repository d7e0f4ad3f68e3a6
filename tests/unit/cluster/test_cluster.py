"""`make test-cluster` without a cluster: which commands it runs, with fakes in place of the programs."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.cluster.created import NAME, configuration
from tests.cluster.e2e import Outcome
from tests.cluster.skips import skips
from tests.cluster.table import written
from tests.cluster.versions import versions
from tests.support.kustomize import KUBECTL, REPOSITORY

FAKE = Path(__file__).with_name("fake.py")
PROGRAMS = ("kind", "kubectl", "helm", "docker")
FLAGS: Mapping[str, set[str]] = {
    "kind create cluster": {"--name", "--kubeconfig", "--image", "--config"},
    "kind load image-archive": {"--name"},
    "kind get clusters": set(),
    "kind get nodes": {"--name"},
    "kind export logs": {"--name"},
    "kind delete cluster": {"--name", "--kubeconfig"},
    "helm upgrade": {
        "--kubeconfig", "--install", "--namespace", "--create-namespace", "--values", "--repo", "--version"
    },
    "helm uninstall": {"--kubeconfig", "--namespace", "--ignore-not-found"},
    "docker info": set(),
    "docker build": {"--file", "--target", "--tag"},
    "docker save": {"--output"},
    "docker create": set(),
    "docker cp": set(),
    "docker exec": set(),
    "docker rm": set(),
    "docker image rm": set(),
    "ginkgo": {
        "--procs", "--timeout", "--no-color", "--focus", "--skip",
        "--kubeconfig", "--kubectl-path", "--provider", "--disable-log-dump", "--report-dir",
    },
}  # fmt: skip
"""The commands with those of their flags that are used. Sources: pkg/cmd of kind and of Helm v4.2.4,
types/config.go of Ginkgo v2, and hack/ci/e2e-k8s.sh of kind for the flags of e2e.test."""


class Done(NamedTuple):
    """`calls`: the words and the standard input of each program."""

    code: int
    output: str
    errors: str
    calls: Sequence[tuple[list[str], str]]

    def commands(self, start: str) -> list[str]:
        lines = [" ".join(words) for words, _ in self.calls]
        return [line for line in lines if line.startswith(start)]


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the program. `without`: programs that are missing; other keywords are environment variables."""

    def ran(*arguments: str, without: Sequence[str] = (), **environment: str) -> Done:
        folder, calls = tmp_path / "bin", tmp_path / "calls"
        folder.mkdir()
        calls.touch()
        for name in PROGRAMS:
            if name not in without:
                (folder / name).write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
                (folder / name).chmod(0o755)
        own = {"PATH": str(folder), "CALLS": str(calls), "PYTHONPATH": str(REPOSITORY), **environment}
        command = [sys.executable, "-m", "tests.cluster", f"--results={tmp_path}/results", *arguments]
        done = subprocess.run(
            command, env=own, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
        )
        recorded = [json.loads(line) for line in calls.read_text().splitlines()]
        return Done(done.returncode, done.stdout, done.stderr, recorded)

    return ran


@pytest.mark.parametrize("network", versions().networks)
def test_a_cluster_is_created_tested_in_each_mode_and_deleted(run: Run, network: str) -> None:
    done = run(f"--cni={network}", "--kubernetes=1.36", "--modes=ebpf,ipvs")
    assert done.code == 1, done.errors  # one test of the report failed
    created = done.commands("kind create")
    assert len(created) == 1
    assert f"--image={versions().node_images['1.36']}" in created[0]
    release = [
        json.loads(stdin) for words, stdin in done.calls if words[:1] == ["helm"] and '"mode"' in stdin
    ]
    assert [values["mode"] for values in release] == ["ebpf", "ipvs"]
    assert len(done.commands("ginkgo")) == 2
    assert f"| v1.36.4 | {network} | " in done.output
    assert "| 1 / 1 / 1 |  |  | 1 / 1 / 1 |  |" in done.output
    assert "[sig-network] DNS should resolve" in done.output
    for removal in ("kind delete", "docker image rm", "docker rm"):
        assert done.commands(removal)
    check_flags(done)


def check_flags(done: Done) -> None:
    """Every command and flag exists; those of kubectl are checked by kubectl itself."""
    for words, _ in done.calls:
        line = [word for word in words if not word.startswith("--kubeconfig")]
        if words[0] == "kubectl":
            check_kubectl(tuple(line[1 : line.index("--") if "--" in line else None]))
            continue
        (command,) = [name for name in FLAGS if " ".join([*line, ""]).startswith(f"{name} ")]
        flags = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--"}
        assert command == "docker exec" or flags <= FLAGS[command]


@functools.cache
def check_kubectl(words: Sequence[str]) -> None:
    done = subprocess.run(
        [KUBECTL, *words, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_proxy_runs_before_the_network_plugin_which_needs_it(run: Run) -> None:
    calls = [" ".join(words) for words, _ in run("--cni=flannel", "--modes=ebpf").calls]
    (proxy,) = [number for number, line in enumerate(calls) if "upgrade --install ebpfproxy" in line]
    (plugin,) = [number for number, line in enumerate(calls) if "upgrade --install flannel" in line]
    (ready,) = [number for number, line in enumerate(calls) if " wait " in line]
    assert proxy < plugin < ready


def test_the_cluster_of_kubeconfig_is_neither_created_nor_deleted(run: Run, tmp_path: Path) -> None:
    image = "registry.example/ebpfproxy:0.2.0"
    done = run("--modes=nftables", f"--image={image}", KUBECONFIG=str(tmp_path / "config"), without=["kind"])
    assert done.code == 1, done.errors
    assert not done.commands("kind")
    assert not done.commands("docker build")
    (values,) = [json.loads(stdin) for words, stdin in done.calls if words[0] == "helm" and stdin]
    assert values["image"] == {"repository": "registry.example/ebpfproxy", "tag": "0.2.0"}
    assert values["apiServer"] == {"host": "192.0.2.7", "port": 6443}
    assert done.commands("helm")[-1].split()[2:4] == ["uninstall", "ebpfproxy"]
    check_flags(done)


@pytest.mark.parametrize(
    ("arguments", "without", "environment", "error"),
    [
        ([], ["kind"], {}, "cannot run kind: .*go install sigs.k8s.io/kind@v"),
        ([], ["helm"], {}, "cannot run helm: .*install Helm"),
        ([], ["docker"], {}, "cannot use Docker or Podman: neither is in PATH; hint: .*podman"),
        ([], [], {"FAILS": "docker info"}, "cannot use Docker or Podman: docker found, but not running"),
        ([], [], {"CLUSTERS": NAME}, f"it exists; hint: kind delete cluster --name={NAME}"),
        ([], [], {"FAILS": "kind create"}, "`kind create cluster .* exit code 1"),
        ([], [], {"MODE": "nftables"}, "ebpfproxy-a is in mode nftables"),
        ([], [], {"KUBECONFIG": "/config"}, "no image with a tag; hint: --image="),
        (["--image=a:1"], [], {"KUBECONFIG": "/config", "DAEMONSET": "kube-proxy"}, "docs/migration.md"),
        (["--image=a:1"], [], {"KUBECONFIG": "/config", "DAEMONSET": "ebpfproxy"}, "helm uninstall"),
    ],
)
def test_a_problem_is_one_line_with_a_remedy_and_leaves_no_cluster(
    run: Run, arguments: list[str], without: list[str], environment: dict[str, str], error: str
) -> None:
    done = run("--modes=ebpf", *arguments, without=without, **environment)
    assert done.code == 2
    (line,) = [line for line in done.errors.splitlines() if line.startswith("cannot ")]
    assert re.search(error, line)
    assert len(done.commands("kind delete")) == len(done.commands("kind create"))


@pytest.mark.parametrize("command", ["kind create", "helm", "ginkgo"])
def test_a_run_that_is_terminated_leaves_no_cluster(run: Run, command: str) -> None:
    done = run("--modes=ebpf", TERMINATES=command)
    assert done.code == 2
    assert done.commands(command)
    assert done.commands("kind delete")
    assert done.commands("docker image rm")


@pytest.mark.parametrize("name", versions().networks)
def test_kind_installs_only_kindnet_and_never_kube_proxy(name: str) -> None:
    networking = yaml.safe_load(configuration(versions().networks[name], name in ("kindnet", "cilium")))[
        "networking"
    ]
    assert networking["kubeProxyMode"] == "none"
    assert networking["disableDefaultCNI"] == (name in ("flannel", "calico"))


def test_versions_are_pinned_and_the_newest_is_last() -> None:
    assert all(
        re.fullmatch(r"\S+:v[\d.]+@sha256:[0-9a-f]{64}", image) for image in versions().node_images.values()
    )
    minors = [int(version.partition(".")[2]) for version in versions().node_images]
    assert minors == [*range(30, 30 + len(minors))]
    for network in versions().networks.values():
        assert "/main/" not in network.manifest
        assert all(chart.version for chart in network.charts)


def test_the_workflow_runs_every_version_and_network_plugin_on_both_machines() -> None:
    text = (REPOSITORY / ".github/workflows/cluster.yml").read_text()
    matrix = yaml.safe_load(text)["jobs"]["cluster"]["strategy"]["matrix"]
    assert matrix["kubernetes"] == [*versions().node_images]
    ends = (matrix["kubernetes"][0], matrix["kubernetes"][-1])
    others = {(each["cni"], each["kubernetes"], each["runner"]) for each in matrix["include"]}
    assert others == {
        (name, version, runner)
        for name in versions().networks
        if name not in matrix["cni"]
        for version in ends
        for runner in matrix["runner"]
    }
    assert f"sigs.k8s.io/kind@{versions().kind}" in text


@pytest.mark.parametrize("mode", ["ebpf", "nftables", "iptables", "ipvs", "userspace"])
def test_every_skip_is_an_expression_with_a_reason(mode: str) -> None:
    for expression, reason in skips(mode, "ipv4").items():
        re.compile(expression)
        assert reason
        assert not re.search(expression, "[sig-network] Services should serve a basic endpoint [Conformance]")


def test_the_table_has_the_newest_version_first_and_names_what_failed() -> None:
    outcomes = [
        Outcome("v1.30.13", "kindnet", "x86_64", "ebpf", 173, [], 4),
        Outcome("v1.37.0", "calico", "aarch64", "ipvs", 170, ["[sig-network] a"], 4),
    ]
    _, _, first, second, *rest = written(outcomes).splitlines()
    assert first == "| v1.37.0 | calico | aarch64 |  |  |  | 170 / 1 / 4 |  |"
    assert second == "| v1.30.13 | kindnet | x86_64 | 173 / 0 / 4 |  |  |  |  |"
    assert rest[-1] == "- v1.37.0, calico, aarch64, mode `ipvs`: [sig-network] a"
