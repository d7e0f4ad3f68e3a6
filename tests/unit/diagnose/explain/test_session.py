"""Explaining from manifests: Services by name, objects that no proxy serves, and assumed nodes and zones."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.api.event import Unserved
from ebpfproxy.backends.ebpf.inspect.saved import SavedView, new_header
from ebpfproxy.config import Config
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.session import Answer, Session, Sources
from ebpfproxy.errors import ConfigError, NotFound
from ebpfproxy.lab import manifests
from ebpfproxy.model.address import format_address
from ebpfproxy.plan.reason import AnyReason
from tests.unit.diagnose.explain.scene import reasons

OFFLINE = Sources(kernel=False)


def answer(
    folder: Path, *objects: Any, destination: str = "web", client: str = "", sources: Sources = OFFLINE
) -> Answer:
    manifests.write(folder / "all.yaml", *objects)
    config = Config(manifests=folder, hostname_override="here")
    with Session(config, sources) as session:
        return session.answer(destination, client)


def web(**spec: Any) -> list[Any]:
    return [
        manifests.service("web", ["10.96.0.10"], [manifests.port(80, name="http")], **spec),
        manifests.endpoint_slice(
            "web-1",
            "web",
            [manifests.endpoint("10.1.0.1", node="here"), manifests.endpoint("10.1.9.1", node="there")],
            [manifests.port(8080, name="http")],
        ),
    ]


def all_reasons(found: Answer) -> set[AnyReason]:
    return {reason for each in found.explanations for reason in reasons(each)}


def test_every_frontend_of_a_service_is_explained(tmp_path: Path) -> None:
    node = manifests.node("here", ["192.0.2.10"])
    ports = [manifests.port(80, name="http", node_port=30080)]
    service = manifests.service("web", ["10.96.0.10"], ports, type="NodePort", externalIPs=["203.0.113.1"])
    found = answer(tmp_path, node, service, web()[1])
    assert found.works
    assert [str(each.destination) for each in found.explanations] == [
        "10.96.0.10:80/TCP",
        "203.0.113.1:80/TCP",
        "192.0.2.10:30080/TCP",
    ]
    assert Reason.NO_NODE_OBJECT not in all_reasons(found)


@pytest.mark.parametrize(
    "destination", ["default/web:http", "web:80", "web.default.svc.cluster.local:http/TCP", "10.96.0.10"]
)
def test_a_service_has_several_names(tmp_path: Path, destination: str) -> None:
    found = answer(tmp_path, *web(), destination=destination)
    assert [str(each.destination) for each in found.explanations] == ["10.96.0.10:80/TCP"]
    assert found.works


def test_without_a_node_object_that_is_a_step(tmp_path: Path) -> None:
    assert Reason.NO_NODE_OBJECT in all_reasons(answer(tmp_path, *web()))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"clusterIP": "None", "clusterIPs": ["None"]}, Unserved.HEADLESS),
        ({"type": "ExternalName"}, Unserved.EXTERNAL_NAME),
        ({"clusterIP": ""}, Unserved.NO_CLUSTER_IP),
    ],
)
def test_a_service_that_no_proxy_serves_does_not_work(
    tmp_path: Path, spec: dict[str, Any], reason: Reason
) -> None:
    found = answer(tmp_path, *web(**spec))
    assert not found.works
    assert all_reasons(found) == {reason, Reason.NO_SERVICE}


def test_a_service_of_another_proxy_does_not_work(tmp_path: Path) -> None:
    service, slices = web()
    service["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": "other"}
    found = answer(tmp_path, service, slices)
    assert not found.works
    assert Unserved.OTHER_PROXY in all_reasons(found)


def test_a_port_that_the_service_lacks_does_not_work(tmp_path: Path) -> None:
    found = answer(tmp_path, *web(), destination="web:https")
    assert not found.works
    assert Reason.NO_PORT in all_reasons(found)


def test_an_invalid_service_has_the_complaint(tmp_path: Path) -> None:
    found = answer(tmp_path, *web(clusterIP=5))
    (explanation,) = found.explanations
    assert explanation.why is Reason.INVALID_OBJECT
    assert "default/web" in explanation.steps[0].details[0]


def test_parts_that_cannot_be_served_are_a_step(tmp_path: Path) -> None:
    found = answer(tmp_path, *web(externalIPs=["nonsense"]))
    assert found.works
    (step,) = (s for s in found.explanations[0].steps if s.reason is Reason.REJECTED_PART)
    assert "nonsense" in step.details[0]


def test_a_frontend_of_another_service_does_not_work(tmp_path: Path) -> None:
    thief = manifests.service(
        "thief", ["10.96.0.11"], [manifests.port(80, name="http")], externalIPs=["10.96.0.10"]
    )
    found = answer(tmp_path, *web(), thief, destination="thief")
    lost = next(each for each in found.explanations if str(each.destination) == "10.96.0.10:80/TCP")
    assert Reason.LOST_CLAIM in reasons(lost)
    assert lost.service == "default/web:http"
    assert not lost.works


def test_the_assumed_node_and_zone_decide(tmp_path: Path) -> None:
    service, slices = web(internalTrafficPolicy="Local")
    for node, used in (("here", ["10.1.0.1"]), ("there", ["10.1.9.1"]), ("nowhere", [])):
        found = answer(tmp_path, service, slices, sources=Sources(node=node))
        (explanation,) = found.explanations
        assert [format_address(each.address) for each in explanation.endpoints if each.used] == used
        assert found.works is bool(used)
    service, slices = web()
    for entry, zone in zip(slices["endpoints"], ("a", "b"), strict=True):
        entry["hints"] = {"forZones": [{"name": zone}]}
    found = answer(tmp_path, service, slices, sources=Sources(zone="b", kernel=False))
    (explanation,) = found.explanations
    assert [format_address(each.address) for each in explanation.endpoints if each.used] == ["10.1.9.1"]


def test_an_unknown_service_is_an_error_with_similar_names(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="default/wed") as error:
        answer(tmp_path, *web(), destination="wed")
    assert "default/web" in error.value.hint


def test_an_address_without_a_frontend_needs_a_port(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"10\.97\.0\.1"):
        answer(tmp_path, *web(), destination="10.97.0.1")
    assert not answer(tmp_path, *web(), destination="10.97.0.1:80").works


@pytest.mark.parametrize("text", ["10.96.0.10:http", "Web", "a/b/c", "", "10.96.0.10:99999"])
def test_a_destination_that_cannot_be_read_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        answer(tmp_path, *web(), destination=text)


@pytest.mark.parametrize(
    ("client", "kind"),
    [
        ("node", "node"),
        ("pod", "pod"),
        ("outside", "outside"),
        ("192.0.2.10", "node"),
        ("10.1.0.1", "pod"),  # an endpoint on this node
        ("10.5.0.1", "pod"),  # in podCIDRs
        ("10.1.9.1", "outside"),
    ],
)
def test_a_client_is_known_by_its_address_or_a_word(tmp_path: Path, client: str, kind: str) -> None:
    node = manifests.node("here", ["192.0.2.10"])
    node["spec"] = {"podCIDRs": ["10.5.0.0/24"]}
    assert answer(tmp_path, *web(), node, client=client).origin.kind.value == kind


@pytest.mark.parametrize("client", ["1", "cni-1234", "nonsense.example"])
def test_processes_and_namespaces_need_the_kernel(tmp_path: Path, client: str) -> None:
    with pytest.raises(ConfigError, match="--from"):
        answer(tmp_path, *web(), client=client)


def test_the_rows_of_a_dump_are_read_once_for_all_destinations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty: dict[str, Any] = {"header": new_header("here", "ebpf")._asdict(), "services": [], "devices": []}
    (tmp_path / "saved").mkdir()
    file = tmp_path / "saved" / "dump.json"
    file.write_text(json.dumps(empty))
    view, reads = SavedView(file), Counter[str]()

    def read(section: str, row_type: object) -> list[Any]:
        reads[section] += 1
        return []

    monkeypatch.setattr(view, "_rows", read)
    ports = [manifests.port(number, name=f"p{number}") for number in range(80, 85)]
    service = manifests.service("web", ["10.96.0.10"], ports)
    found = answer(tmp_path, service, client="outside", sources=Sources(dump=view, kernel=False))
    assert len(found.explanations) == 5
    assert all(each.disagreements for each in found.explanations)
    assert reads.pop("devices") == 2  # their roles, and their programs
    assert set(reads.values()) == {1}
