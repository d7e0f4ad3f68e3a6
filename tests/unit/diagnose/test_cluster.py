"""Reading the cluster's state once."""

import queue
import time
from pathlib import Path

import pytest

from ebpfproxy.agent.inbox import Received
from ebpfproxy.api.event import ADDRESSES, DEVICES, ENDPOINT_SLICE, SERVICE, Synced, Unserved
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.config import Config
from ebpfproxy.diagnose import cluster
from ebpfproxy.diagnose.cluster import read_cluster
from ebpfproxy.errors import EbpfProxyError, Rejected
from ebpfproxy.lab import manifests
from ebpfproxy.model.service import NamespacedName


def config(folder: Path) -> Config:
    return Config(manifests=folder, hostname_override="here")


def test_services_slices_and_node_are_read(tmp_path: Path) -> None:
    web = manifests.service("web", ["10.96.0.1"], [manifests.port(80)])
    slices = manifests.endpoint_slice(
        "web-1", "web", [manifests.endpoint("10.1.0.1")], [manifests.port(8080)]
    )
    manifests.write(tmp_path / "all.yaml", web, slices, manifests.node("here"))
    found = read_cluster(config(tmp_path))
    name = NamespacedName("default", "web")
    assert set(found.state.services) == {name}
    assert len(found.state.slices_of(name)) == 1
    assert found.state.node
    assert found.state.devices
    assert not found.complaints


def test_an_object_that_cannot_be_served_is_reported(tmp_path: Path) -> None:
    web = manifests.service("web", ["not an address"], [manifests.port(80)])
    manifests.write(tmp_path / "all.yaml", web)
    (complaint,) = read_cluster(config(tmp_path)).complaints
    assert (complaint.kind, complaint.name) == (SERVICE, "default/web")


def test_a_service_that_no_proxy_serves_is_reported_with_the_reason(tmp_path: Path) -> None:
    manifests.write(tmp_path / "all.yaml", manifests.service("web", ["None"], [manifests.port(80)]))
    assert read_cluster(config(tmp_path)).unserved == {NamespacedName("default", "web"): Unserved.HEADLESS}


def test_without_a_node_object_the_state_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "NODE_SECONDS", 0.01)
    inbox: queue.SimpleQueue[Received] = queue.SimpleQueue()
    for kind in (SERVICE, ENDPOINT_SLICE, ADDRESSES, DEVICES):
        inbox.put(Received(0.0, Synced(kind)))
    assert cluster._fold(inbox, time.monotonic() + 60, Tracker(0.0)).state.node is None  # type: ignore[arg-type]


def test_lists_that_do_not_arrive_are_named() -> None:
    inbox: queue.SimpleQueue[Received] = queue.SimpleQueue()
    inbox.put(Received(0.0, Synced(SERVICE)))
    with pytest.raises(Rejected, match="EndpointSlice, Node, ServiceCIDR, addresses, devices"):
        cluster._fold(inbox, time.monotonic() + 0.01, Tracker(0.0))  # type: ignore[arg-type]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EbpfProxyError, match="missing"):
        read_cluster(config(tmp_path / "missing"))
