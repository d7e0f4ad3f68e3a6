"""The objects of a benchmark: sizes, session affinity, and Services that change."""

import json
from pathlib import Path

import pytest

from ebpfproxy.api.parse import parse_service, parse_slice
from ebpfproxy.bench import churn, workload
from ebpfproxy.bench.agent_runner import FaultSchedule
from ebpfproxy.bench.other_services import OtherServices
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import api_server, manifests


def of_kind(folder: Path, kind: str) -> list[manifests.Object]:
    return [each for each in api_server.read_folder(folder) if each["kind"] == kind]


def test_fifty_thousand_services_of_five_endpoints_have_distinct_addresses() -> None:
    services, endpoints = 50_000, 5
    assert len({workload.cluster_ip(index) for index in range(services)}) == services
    addresses = {each for index in range(services) for each in workload.addresses_of(index, endpoints)}
    assert len(addresses) == services * endpoints


def test_a_service_with_150_000_endpoints_has_slices_of_a_hundred() -> None:
    slices = list(workload.endpoint_slices(0, workload.addresses_of(0, 150_000)))
    assert len({each["metadata"]["name"] for each in slices}) == 1500
    assert {len(each["endpoints"]) for each in slices} == {100}


def test_a_service_without_endpoints_has_one_slice() -> None:
    assert [each["endpoints"] for each in workload.endpoint_slices(0, [])] == [[]]


def test_the_share_of_services_with_session_affinity_is_exact(tmp_path: Path) -> None:
    workload.write(tmp_path, 200, 1, affinity=10)
    services = of_kind(tmp_path, "Service")
    assert sum(each["spec"].get("sessionAffinity") == "ClientIP" for each in services) == 20


@pytest.mark.parametrize("count", [0, 1, 150])
def test_other_services_are_all_in_the_folder_and_valid(tmp_path: Path, count: int) -> None:
    OtherServices(tmp_path, count, 3)
    services, slices = of_kind(tmp_path, "Service"), of_kind(tmp_path, "EndpointSlice")
    assert len({parse_service(json.dumps(each).encode()) for each in services}) == count
    assert len({parse_slice(json.dumps(each).encode()) for each in slices}) == count


def test_each_change_of_another_service_replaces_one_endpoint(tmp_path: Path) -> None:
    others = OtherServices(tmp_path, 4, 3)
    previous = {each["metadata"]["name"]: addresses(each) for each in of_kind(tmp_path, "EndpointSlice")}
    for number in range(4, 24):
        changed = others.changed(number)
        name = changed["metadata"]["name"]
        assert len(addresses(changed)) == 3
        assert addresses(changed) != previous[name]
        previous[name] = addresses(changed)


def addresses(value: manifests.Object) -> set[str]:
    return {each["addresses"][0] for each in value["endpoints"]}


def test_changes_need_other_services() -> None:
    size = churn.Size(0, 1.0, 10.0, changes=5.0)
    with pytest.raises(ConfigError, match="--changes needs other Services"):
        next(churn.run(size, FaultSchedule(), ["ebpf"], lambda text, done=None, /: None))
