"""Events of the Node at an API server: the start of the agent, and its mode."""

import pathlib
import queue
from collections.abc import Iterator

import pytest

from ebpfproxy.agent.sources import Sources
from ebpfproxy.config import Config
from ebpfproxy.http.metrics import Metrics
from tests.kernel.cluster import eventually
from tests.support.apiserver import ApiServer


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


@pytest.fixture
def sources(server: ApiServer, tmp_path: pathlib.Path) -> Iterator[Sources]:
    path = tmp_path / "kubeconfig"
    server.write_kubeconfig(path)
    config = Config(hostname_override="node-1", kubeconfig=path)
    made = Sources(config, queue.SimpleQueue(), Metrics(), None)
    made.start()
    yield made
    made.stop()


def await_events(server: ApiServer, *expected: tuple[str, str]) -> None:
    """Wait until these are the events of the Node, each by reason and type."""

    def found() -> bool:
        events = [each for each in server.events if each["regarding"]["kind"] == "Node"]
        assert all(each["regarding"]["name"] == "node-1" for each in events)
        return sorted((each["reason"], each["type"]) for each in events) == sorted(expected)

    eventually(found, "the events exist")


def test_the_start_and_what_failed_at_it_are_events(server: ApiServer, sources: Sources) -> None:
    sources.report_start({"healthz": "the port is in use"}, "ipvs", {"ebpf": "no permission"})
    await_events(
        server,
        ("Starting", "Normal"),
        ("FailedToStartProxierHealthcheck", "Warning"),
        ("IPVSDeprecation", "Warning"),
        ("ProxyModeFallback", "Warning"),
    )


def test_a_switch_to_a_mode_that_is_not_preferred_is_an_event(server: ApiServer, sources: Sources) -> None:
    sources.report_mode("nftables", {"ebpf": "no permission"})
    await_events(server, ("ProxyModeFallback", "Warning"))
