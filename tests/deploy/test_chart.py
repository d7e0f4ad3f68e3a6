"""The Helm chart: valid, documented, and equal to the kustomize folders for equal settings."""

import json
import operator
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebpfproxy import __version__
from ebpfproxy.config.settings import OPTIONS
from tests.deploy.test_manifests import _SCHEMAS, _VERSIONS, configuration
from tests.support import chart, kustomize
from tests.support.chart import CHART, EXAMPLES
from tests.support.kustomize import DEPLOY, Object, one

VALUES: dict[str, Any] = {
    "image": {"repository": "registry.example/ebpfproxy"},
    "apiServer": {"host": "192.0.2.1"},
}
"""The required values."""
OPERATOR = "monitoring.coreos.com/v1"

every_example = pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)


def merged(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return VALUES | values | more


@every_example
def test_every_object_is_valid_by_the_api_schema(path: Path) -> None:
    objects = chart.render(chart.example(path))
    assert {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet"} <= {
        each["kind"] for each in objects
    }
    for entry in objects:
        for version in versions_for(entry):
            _SCHEMAS.validate(entry, version, strict=True)


def versions_for(entry: Object) -> list[str]:
    """The Kubernetes versions that an object is for: none for custom resources, and from 1.30 with
    `appArmorProfile`."""
    if entry["apiVersion"] == OPERATOR:
        return []
    if "appArmorProfile" in json.dumps(entry):
        return [each for each in _VERSIONS if int(each.split(".")[1]) >= 30]
    return _VERSIONS


@every_example
def test_the_chart_has_no_lint(path: Path) -> None:
    assert chart.lint(chart.example(path)) == []


@every_example
def test_the_agent_loads_the_configuration_without_remarks(path: Path, tmp_path: Path) -> None:
    objects = chart.render(chart.example(path))
    data = next(
        each["data"] for each in objects if each["kind"] == "ConfigMap" and "config.conf" in each["data"]
    )
    loaded = configuration(data["config.conf"], tmp_path)
    assert loaded.remarks == ()
    command, *flags = one(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["args"]
    known = {name for option in OPTIONS.values() for name in option.flag.split()}
    assert command == "run"
    assert {flag.partition("=")[0] for flag in flags} <= known


KUSTOMIZED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "base": ("base", "", {}),
    "nftables": ("modes/nftables", "", {"mode": "nftables"}),
    "iptables": ("modes/iptables", "", {"mode": "iptables"}),
    "ipvs": ("modes/ipvs", "", {"mode": "ipvs"}),
    "userspace": ("modes/userspace", "", {"mode": "userspace"}),
    "one-node": ("base", "one-node", {"nodeSelector": {"service-proxy": "ebpfproxy"}}),
    "host-ports": ("base", "host-ports", {"hostPorts": True}),
    "socket-lb-annotations": ("base", "socket-lb-annotations", {"socketLbAnnotations": True}),
    "direct-server-return": ("base", "direct-server-return", {"dsrPort": 6083}),
    "with-bcc": ("base", "with-bcc", {"compiler": True}),
    "least-privilege": ("base", "least-privilege", {"privileged": False}),
}


@pytest.mark.parametrize(("base", "component", "values"), KUSTOMIZED.values(), ids=KUSTOMIZED.keys())
def test_the_chart_and_kustomize_give_the_same_objects(
    base: str, component: str, values: dict[str, Any], tmp_path: Path
) -> None:
    theirs = kustomized(tmp_path, base, component)
    for entry in theirs:
        for version in versions_for(entry):
            _SCHEMAS.validate(entry, version, strict=True)
    assert by_name(chart.render(merged(values))) == by_name(theirs)


def test_the_object_that_has_an_apparmor_profile_is_valid_from_1_30_on(tmp_path: Path) -> None:
    daemon_set = one(kustomized(tmp_path, "base", "least-privilege"), "DaemonSet")
    versions = versions_for(daemon_set)
    assert versions
    assert set(versions) < set(_VERSIONS)
    with pytest.raises(_SCHEMAS.ValidationError):
        _SCHEMAS.validate(daemon_set, _VERSIONS[-1], strict=True)


def test_every_component_and_mode_is_compared_with_the_chart() -> None:
    components = {folder.name for folder in kustomize.folders("Component")} - {"monitoring"}
    assert {component for _, component, _ in KUSTOMIZED.values() if component} == components
    assert {path.name for path in (DEPLOY / "modes").iterdir()} <= KUSTOMIZED.keys()


def test_monitoring_is_the_same_with_the_chart_and_with_kustomize(tmp_path: Path) -> None:
    wanted = ("PodMonitor", "PrometheusRule", "dashboard")
    values = chart.example(EXAMPLES / "monitoring.yaml")
    for part in values["metrics"]:
        if part != "bindAddress":
            values["metrics"][part].pop("labels", None)
    ours = by_name(chart.render(values))
    theirs = by_name(kustomized(tmp_path, "base", "monitoring"))
    keys = [key for key in theirs if any(each in " ".join(key) for each in wanted)]
    assert len(keys) == 3
    assert [ours[key] for key in keys] == [theirs[key] for key in keys]


def kustomized(folder: Path, base: str, component: str) -> list[Object]:
    """The objects of the base with the component, the image and the API server of VALUES."""
    shutil.copytree(DEPLOY, folder / "deploy")
    overlay = folder / "deploy/compared"
    overlay.mkdir()
    text = {
        "resources": [f"../{base}"],
        "components": [f"../{component}"] if component else [],
        "images": [{"name": "ebpfproxy", "newName": "registry.example/ebpfproxy", "newTag": __version__}],
        "configMapGenerator": [
            {
                "name": "ebpfproxy",
                "namespace": "kube-system",
                "behavior": "merge",
                "literals": ["api-server=https://192.0.2.1:6443"],
            }
        ],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return kustomize.render(overlay)


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """The objects by kind and name. The configuration file is parsed, since it has comments in one of them.
    Lists of volumes are sorted, since a component adds its own at another place."""
    for each in objects:
        if each["kind"] == "DaemonSet":
            spec = each["spec"]["template"]["spec"]
            for volumes in (spec["volumes"], spec["containers"][0]["volumeMounts"]):
                volumes.sort(key=operator.itemgetter("name"))
        if "config.conf" in (each.get("data") or {}):
            each["data"]["config.conf"] = yaml.safe_load(each["data"]["config.conf"])
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


@pytest.mark.parametrize(
    "values",
    [
        {"image": {"repository": ""}},
        {"image": {"repository": "a", "digest": "sha256:1"}},
        {"image": {"repository": "a", "pullPolicy": "Sometimes"}},
        {"apiServer": {"host": ""}},
        {"apiServer": {"host": "https://192.0.2.1"}},
        {"apiServer": {"host": "192.0.2.1", "port": "6443"}},
        {"mode": "kernelspace"},
        {"config": {"mode": "ipvs"}},
        {"config": {"metricsBindAddress": "0.0.0.0:1"}},
        {"privileged": "no"},
        {"nodeselector": {}},
        {"extraArgs": ["v=4"]},
        {"dsrPort": 65536},
        {"dsrPort": "6083"},
        {"maxUnavailable": 0},
        {"resources": {"request": {}}},
        {"cgroup": {"hostPath": "sys/fs/cgroup"}},
        {"metrics": {"bindAddress": "127.0.0.1:10249", "podMonitor": {"enabled": True}}},
        {"metrics": {"bindAddress": "everywhere"}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(chart.Rejected, match=r"(?m)^- at '"):
        chart.render(merged(values))


def test_the_defaults_lack_only_the_image_and_the_api_server() -> None:
    with pytest.raises(chart.Rejected):
        chart.render({})
    assert chart.render(VALUES)


def test_ipv6_addresses_of_the_api_server_get_brackets() -> None:
    data = one(chart.render(merged({"apiServer": {"host": "fd00::1"}})), "ConfigMap")["data"]
    assert data["api-server"] == "https://[fd00::1]:6443"


def test_the_versions_are_those_of_the_project() -> None:
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert metadata["version"] == metadata["appVersion"] == __version__


def test_the_schema_has_exactly_the_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert differences(values, schema, "") == []


def differences(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    """Values without a schema, and properties of the schema without a value. Free mappings have none."""
    properties = {key: each for key, each in schema.get("properties", {}).items() if each is not False}
    if not properties or schema.get("additionalProperties") is not False:
        return []
    found = [f"{path}{key}" for key in value.keys() ^ properties.keys()]
    for key in value.keys() & properties.keys():
        if isinstance(value[key], dict):
            found += differences(value[key], properties[key], f"{path}{key}.")
    return [each for each in found if each != "resources.claims"]  # optional


def test_the_notes_name_the_next_commands() -> None:
    text = chart.notes(VALUES)
    assert "kubectl -n kube-system rollout status daemonset/ebpfproxy" in text
