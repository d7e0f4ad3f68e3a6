"""The manifests are complete, valid by the API's schemas, and accepted by the agent."""

import importlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from ebpfproxy.backends.selection import MODES
from ebpfproxy.config.load import load
from ebpfproxy.config.settings import HEALTHZ_PORT, METRICS_PORT, OPTIONS
from ebpfproxy.linux.bpf.object_cache import FOLDER
from tests.support.kustomize import DEPLOY, KUBECTL, REPOSITORY, Object, folders, one, render

_SCHEMAS: Any = importlib.import_module("kubernetes_validate")  # it has no type hints
_EVERY = [*dict.fromkeys(map(_SCHEMAS.utils.major_minor, _SCHEMAS.utils.all_versions()))]
_VERSIONS: list[str] = _EVERY[::-4]
"""Kubernetes versions: the latest, and every fourth one before, down to 1.25."""


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(REPOSITORY)) for path in paths]


every_folder = pytest.mark.parametrize("folder", names(folders()))
EDGE = DEPLOY / "edge"
"""It has no pod: an edge is no machine of the cluster."""
every_pod = pytest.mark.parametrize("folder", names([each for each in folders() if each != EDGE]))


def rendered(folder: str) -> list[Object]:
    return render(REPOSITORY / folder)


def container(objects: list[Object]) -> Object:
    found: Object = one(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    return found


def configuration(text: str, folder: Path) -> Any:
    """The configuration as loaded by the agent."""
    path = folder / "config.conf"
    path.write_text(text)
    return load({"config": str(path)})


@every_folder
@pytest.mark.parametrize("version", _VERSIONS)
def test_every_object_is_valid_by_the_api_schema(folder: str, version: str) -> None:
    """Strict: no unknown field, no missing field, and the right type for each field."""
    for entry in rendered(folder):
        _SCHEMAS.validate(entry, version, strict=True)


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        (("spec", "template", "spec"), "hostNetwrk", True),
        (("spec", "template", "spec"), "hostPID", "yes"),
        (("spec", "template", "spec", "containers", 0), "name", None),
        (("spec", "template", "spec", "containers", 0, "livenessProbe"), "periodSeconds", "10"),
    ],
)
def test_the_schema_check_finds_wrong_fields(where: tuple[str | int, ...], key: str, value: object) -> None:
    daemon_set: Any = one(rendered("deploy/base"), "DaemonSet")
    parent = daemon_set
    for step in where:
        parent = parent[step]
    parent.pop(key, None)
    if value is not None:
        parent[key] = value
    with pytest.raises(_SCHEMAS.ValidationError):
        _SCHEMAS.validate(daemon_set, _VERSIONS[0], strict=True)


@every_pod
def test_all_objects_that_the_pod_refers_to_exist(folder: str) -> None:
    objects = rendered(folder)
    daemon_set = one(objects, "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    account, binding = one(objects, "ServiceAccount"), one(objects, "ClusterRoleBinding")
    assert spec["serviceAccountName"] == account["metadata"]["name"]
    assert binding["roleRef"]["name"] == one(objects, "ClusterRole")["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount"} | {key: account["metadata"][key] for key in ("name", "namespace")}
    ]
    config_map = one(objects, "ConfigMap")
    assert config_map["metadata"]["name"] == "ebpfproxy", (
        "a name with a content hash would restart agents instead of reloading"
    )
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["name"] for mount in container(objects)["volumeMounts"]}
    assert volumes.keys() == mounts
    assert {item["key"] for item in volumes["config"]["configMap"]["items"]} <= config_map["data"].keys()
    (reference,) = [
        each["valueFrom"]["configMapKeyRef"]
        for each in container(objects)["env"]
        if "configMapKeyRef" in each["valueFrom"]
    ]
    assert reference["name"] == config_map["metadata"]["name"]
    assert reference["key"] in config_map["data"]
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]
    assert daemon_set["spec"]["selector"]["matchLabels"].items() <= labels.items()


@every_pod
def test_the_agent_loads_the_configuration_without_remarks(folder: str, tmp_path: Path) -> None:
    loaded = configuration(one(rendered(folder), "ConfigMap")["data"]["config.conf"], tmp_path)
    assert loaded.remarks == ()
    mode = Path(folder).name
    wanted = mode if Path(folder).parent.name == "modes" else loaded.config.proxy_mode
    assert loaded.config.proxy_mode == wanted


def test_every_fallback_mode_has_a_folder() -> None:
    """The first mode is the default of the base."""
    assert {path.name for path in (DEPLOY / "modes").iterdir()} == {mode.name for mode in MODES[1:]}


@every_pod
def test_the_arguments_are_flags_of_the_agent(folder: str) -> None:
    command, *flags = container(rendered(folder))["args"]
    assert command == "run"
    known = {name for option in OPTIONS.values() for name in option.flag.split()}
    assert {flag.partition("=")[0] for flag in flags} <= known


@every_pod
def test_probes_use_the_agents_ports_and_paths(folder: str, tmp_path: Path) -> None:
    objects = rendered(folder)
    loaded = configuration(one(objects, "ConfigMap")["data"]["config.conf"], tmp_path)
    ports = {port["name"]: port for port in container(objects)["ports"]}
    assert loaded.config.healthz_listen == ("0.0.0.0", HEALTHZ_PORT)
    assert {name: port["containerPort"] for name, port in ports.items()} == {
        "healthz": HEALTHZ_PORT,
        "metrics": METRICS_PORT,
    }
    paths = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for kind, path in paths.items():
        assert container(objects)[kind]["httpGet"] == {"path": path, "port": "healthz"}


@every_pod
def test_a_rollout_never_runs_two_agents_on_a_node(folder: str) -> None:
    assert one(rendered(folder), "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0


def test_an_overlay_can_replace_the_configuration(tmp_path: Path) -> None:
    """It replaces the base's configuration; the API server's address is a placeholder."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    overlay = tmp_path / "deploy/example/kustomization.yaml"
    text = overlay.read_text()
    own = text.replace("# files:\n    #   - config.conf", "files:\n      - config.conf")
    assert own != text
    overlay.write_text(own)
    (overlay.parent / "config.conf").write_text("mode: ipvs\n")
    data = one(render(overlay.parent), "ConfigMap")["data"]
    assert data == {"config.conf": "mode: ipvs\n", "api-server": "CHANGE-ME"}


def test_with_bcc_the_object_files_are_kept_on_the_node(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    overlay = tmp_path / "deploy/example/kustomization.yaml"
    text = overlay.read_text().replace("#   - ../with-bcc", "  - ../with-bcc").replace("# comp", "comp")
    overlay.write_text(text)
    objects = render(overlay.parent)
    mounted = {each["name"]: each["mountPath"] for each in container(objects)["volumeMounts"]}
    (cache,) = [name for name, path in mounted.items() if Path(path) == FOLDER.parent]
    volumes = one(objects, "DaemonSet")["spec"]["template"]["spec"]["volumes"]
    (volume,) = [each for each in volumes if each["name"] == cache]
    assert volume["hostPath"] == {"path": "/var/cache/ebpfproxy", "type": "DirectoryOrCreate"}
    for version in _VERSIONS:
        _SCHEMAS.validate(one(objects, "DaemonSet"), version, strict=True)


def test_with_one_node_both_proxies_are_selected_by_the_same_label(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    overlay = tmp_path / "deploy/example/kustomization.yaml"
    text = overlay.read_text().replace("#   - ../one-node", "  - ../one-node").replace("# comp", "comp")
    overlay.write_text(text)
    selector = one(render(overlay.parent), "DaemonSet")["spec"]["template"]["spec"]["nodeSelector"]
    assert selector == {"kubernetes.io/os": "linux", "service-proxy": "ebpfproxy"}
    daemon_set = one(rendered("deploy/base"), "DaemonSet")  # used instead of kube-proxy's DaemonSet
    (tmp_path / "daemonset.yaml").write_text(yaml.safe_dump(daemon_set))
    patch = DEPLOY / "one-node/kube-proxy.yaml"
    command = [
        str(KUBECTL),
        "patch",
        "--local",
        f"--filename={tmp_path}/daemonset.yaml",
        f"--patch-file={patch}",
    ]
    done = subprocess.run([*command, "--output=yaml"], capture_output=True, text=True, check=True)
    affinity = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "service-proxy", "operator": "DoesNotExist"}]


def test_the_images_versions_satisfy_the_projects_requirements() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    text = (DEPLOY / "requirements.txt").read_text()
    pinned = dict(re.findall(r"^(\S+)==(\S+) ", text, re.MULTILINE))
    by_name = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(by_name[requirement.name]), text
