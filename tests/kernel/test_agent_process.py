"""The agent as a process: its first moments, restarts with a changed file, and its end."""

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.agent.api_events import FAILED_SERVERS, NOT_CREATED
from ebpfproxy.agent.daemon import ENDING, RESTARTING
from ebpfproxy.agent.ending import NOT_ENDED
from ebpfproxy.agent.mode_switch import SAME_MODE
from ebpfproxy.agent.process import START_FAILED
from ebpfproxy.agent.service_events import REASON
from ebpfproxy.config.load import CONFIG_REJECTED
from ebpfproxy.diagnose.doctor.other_proxies import LEFT_OVER
from ebpfproxy.lab import Agent, manifests
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.balancing import MAX_RULES
from tests.kernel.clients import TCP, outcome
from tests.kernel.cluster import Cluster, eventually
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.support.apiserver import ApiServer, make_service

pytestmark = pytest.mark.kernel

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n"


class ConfigMap:
    """A mounted ConfigMap: files are symbolic links through `..data`, which an update replaces at once."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self.file = folder / "config.conf"
        self._versions = 0
        self.update(text)
        self.file.symlink_to("..data/config.conf")

    def update(self, text: str) -> None:
        self._versions += 1
        version = self._folder / f"..version-{self._versions}"
        version.mkdir()
        (version / "config.conf").write_text(HEAD + text)
        new = self._folder / "..new"
        new.symlink_to(version.name)
        new.rename(self._folder / "..data")


def status(cluster: Cluster, path: str, port: int = 10256) -> int:
    """The status of a response; 0 if no server listens."""
    return cluster.node.call(lambda: _status(f"http://127.0.0.1:{port}{path}"))


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def lines(agent: Agent, message: str) -> list[str]:
    return [line.text for line in agent.lines if f" {message} " in line.text]


@contextlib.contextmanager
def connecting(cluster: Cluster, address: str) -> Iterator[list[str]]:
    """Connects again and again within the block; yields the outcomes."""
    stop, outcomes = threading.Event(), []

    def run() -> None:
        while not stop.wait(0.02):
            outcomes.append(outcome(cluster.p, TCP, address, 80))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcomes
    finally:
        stop.set()
        thread.join()


def test_until_the_first_sync_healthz_is_503_and_livez_is_200(restartable: Cluster, tmp_path: Path) -> None:
    with ApiServer() as unreachable:  # in this network namespace: the node cannot reach it
        unreachable.write_kubeconfig(tmp_path / "kubeconfig")
    kubeconfig = f"--kubeconfig={tmp_path / 'kubeconfig'}"
    agent = restartable.launch("--manifests=", kubeconfig, "--proxy-mode=nftables")
    eventually(lambda: status(restartable, "/livez") == 200, "the server answers")
    assert status(restartable, "/healthz") == 503
    eventually(lambda: status(restartable, "/proxyMode", 10249) == 200, "a mode is selected")
    assert (status(restartable, "/healthz"), status(restartable, "/livez")) == (503, 200)
    assert status(restartable, "/readyz") == 503
    assert agent.stop() == 0


def test_sighup_at_any_moment_of_a_start_reloads_the_configuration(restartable: Cluster) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        agent = restartable.launch("--proxy-mode=nftables")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for _ in range(40):
        agent.process.send_signal(signal.SIGHUP)
        time.sleep(0.025)  # the signals arrive during the complete start
    agent.await_sync()
    agent.await_line(lambda line: f" {SAME_MODE} " in line.text)
    assert agent.process.poll() is None
    assert agent.stop() == 0


def test_a_changed_option_restarts_the_agent_once_and_no_connection_fails(
    restartable: Cluster, tmp_path: Path
) -> None:
    config = ConfigMap(tmp_path, "")
    agent = restartable.start(f"--config={config.file}")
    web = restartable.service().to(restartable.a)
    marks = ["nft", "list", "chain", "ip", "kube-proxy", "mark-for-masquerade"]
    assert "0x00004000" in restartable.node.run(marks).stdout
    before = len(agent.lines)
    with connecting(restartable, web.v4) as outcomes:
        for bit in (15, 16, 17):  # three updates within the second that a change must last
            config.update(f"nftables: {{masqueradeBit: {bit}}}\n")
        agent.await_sync(since=before)
        after = len(outcomes)
        eventually(lambda: len(outcomes) >= after + 10, "connections after the restart")
    assert set(outcomes) == {"a"}
    (line,) = lines(agent, RESTARTING)
    assert "options=iptables_masquerade_bit" in line
    assert "0x00020000" in restartable.node.run(marks).stdout
    assert status(restartable, "/healthz") == 200
    assert not lines(agent, NOT_ENDED)
    assert agent.stop() == 0


def test_an_invalid_file_never_ends_the_agent(restartable: Cluster, tmp_path: Path) -> None:
    config = ConfigMap(tmp_path, "")
    agent = restartable.start(f"--config={config.file}")
    config.update("nftables: {masqueradeBit: many}\n")
    agent.await_line(lambda line: f" {CONFIG_REJECTED} " in line.text)
    agent.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(lines(agent, CONFIG_REJECTED)) == 2, "the file is read again")
    assert restartable.service().to(restartable.a)
    assert not lines(agent, RESTARTING)


def test_a_valid_file_with_which_the_agent_cannot_start_is_given_up(
    restartable: Cluster, tmp_path: Path
) -> None:
    """The address is not one of this node, and the failure to listen is to be an error."""
    config = ConfigMap(tmp_path, "")
    flags = (f"--config={config.file}", "--healthz-bind-address=")
    agent = restartable.start(*flags)
    before = len(agent.lines)
    config.update("healthzBindAddress: 192.0.2.1:10256\nbindAddressHardFail: true\n")
    agent.await_line(lambda line: f" {START_FAILED} " in line.text)
    agent.await_sync(since=before)
    restartable.service().to(restartable.a)
    assert len(lines(agent, START_FAILED)) == 1
    config.update("nftables: {masqueradeBit: 18}\n")
    agent.await_sync(since=len(agent.lines))
    assert len(lines(agent, START_FAILED)) == 1
    assert agent.stop() == 0


def test_a_stopped_agent_of_mode_userspace_leaves_only_addresses(restartable: Cluster) -> None:
    """Other modes: test_agent_restarts.py."""

    def left() -> list[str]:
        found = restartable.ebpfproxy("doctor", "--proxy-mode=userspace", "-o", "json", check=False)
        return [each["detail"] for each in json.loads(found.stdout)["checks"] if each["feature"] == LEFT_OVER]

    agent = restartable.start("--proxy-mode=userspace")
    restartable.service().to(restartable.a)
    assert left() == []
    began = time.monotonic()
    os.kill(agent.process.pid, signal.SIGTERM)
    assert agent.process.wait(9) == 0  # the grace period of the DaemonSet is 10 s
    assert not lines(agent, NOT_ENDED), time.monotonic() - began
    (line,) = lines(agent, ENDING)
    assert line.endswith(" forwarding=ends")
    (detail,) = left()
    assert detail.startswith("nothing updates what a stopped proxy has left in force: ")
    assert "of mode userspace: local routes to addresses of Services: " in detail


@pytest.fixture
def server(restartable: Cluster) -> Iterator[ApiServer]:
    """An API server on the node's 127.0.0.1."""
    server = ApiServer()
    server.put(manifests.node(restartable.lab.node_name, [restartable.node.v4, restartable.node.v6]))
    with netns.entered(restartable.node.netns):
        server.start()
    try:
        yield server
    finally:
        restartable.end()
        server.stop()


def test_a_start_creates_an_event_of_the_node_and_requests_are_counted(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    server.write_kubeconfig(tmp_path / "kubeconfig")
    flags = (f"--kubeconfig={tmp_path / 'kubeconfig'}", "--manifests=", "--proxy-mode=nftables")
    agent = restartable.start(*flags)
    eventually(lambda: bool(server.events), "the Event")
    (event,) = server.events
    assert (event["reason"], event["type"], event["action"]) == ("Starting", "Normal", "StartKubeProxy")
    name = restartable.lab.node_name
    assert event["regarding"] == {"kind": "Node", "name": name, "uid": name}
    assert re.fullmatch(r"[-0-9]{10}T[:0-9]{8}[.][0-9]{6}Z", event["eventTime"])
    assert not lines(agent, NOT_CREATED)
    host = f'host="127.0.0.1:{server.port}"'
    for requests in (f'code="200",{host},method="GET"}} ', f'code="201",{host},method="POST"}} 1.0'):
        # A request is counted after its response, which may be after the next line of the log.
        line = f"rest_client_requests_total{{{requests}"
        eventually(functools.partial(restartable.shows, line), line)
    text = restartable.http_get("metrics")
    assert f'rest_client_request_duration_seconds_count{{{host},verb="POST"}} 1.0' in text
    assert f'rest_client_rate_limiter_duration_seconds_count{{{host},verb="POST"}} 1.0' in text
    created = re.search(r'rest_client_transport_create_calls_total{result="uncacheable"} ([0-9.]+)', text)
    assert created
    assert float(created[1]) >= 2  # for the watches, and for the Event


def test_events_report_ports_in_use_and_what_is_ignored(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    """Of the node: the ports of its servers. Of a Service: the port of its health check, and weights beyond
    the bound, which its owner could not read in the logs of the agents."""
    server.write_kubeconfig(tmp_path / "kubeconfig")
    balanced = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 32119}
    web = restartable.service(node_port=True, **balanced)
    weighted = make_service("weighted", "shop")
    text = "node:a=1," * (MAX_RULES + 1)
    weighted["metadata"] |= {"uid": "u-1", "annotations": {"ebpfproxy/endpoint-weights": text}}
    for entry in (*web.objects(), weighted):
        server.put(entry)
    with contextlib.ExitStack() as taken:
        with netns.entered(restartable.node.netns):
            for family, port in itertools.product((socket.AF_INET, socket.AF_INET6), (10256, 10249)):
                taken.enter_context(socket.create_server(("", port), family=family))
            taken.enter_context(socket.create_server(("0.0.0.0", 32119)))
        flags = (f"--kubeconfig={tmp_path / 'kubeconfig'}", "--manifests=", "--proxy-mode=nftables")
        restartable.launch(*flags).await_sync()
        eventually(lambda: len(server.events) == 5, "the Events")
    events = {each["reason"]: each for each in server.events}
    assert len({each["metadata"]["name"] for each in server.events}) == len(events) == 5
    first = events.pop("Starting")
    assert (first["type"], first["note"]) == ("Normal", "")
    assert {each["type"] for each in events.values()} == {"Warning"}
    assert events.pop(REASON)["regarding"]["uid"] == "u-1"
    assert all(each["note"].endswith(": Address already in use") for each in events.values())
    check = events.pop("FailedToStartServiceHealthcheck")
    regarding = {"kind": "Service", "namespace": "default", "name": web.name, "uid": f"default/{web.name}"}
    assert (check["action"], check["regarding"]) == ("Listen", regarding)
    assert " on 0.0.0.0:32119: " in check["note"]
    assert events.keys() == set(FAILED_SERVERS.values())


def test_an_event_of_the_node_reports_the_deprecated_mode(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    """At each start with it, and at each switch to it."""
    skip_without_ipvs("ipvs")
    server.write_kubeconfig(tmp_path / "kubeconfig")
    client = f"clientConnection: {{kubeconfig: {tmp_path / 'kubeconfig'}}}\n"
    config = ConfigMap(tmp_path, client + "mode: ipvs\n")
    restartable.start("--manifests=", f"--config={config.file}")

    def deprecations() -> int:
        return [each["reason"] for each in server.events].count("IPVSDeprecation")

    eventually(lambda: deprecations() == 1, "the Event at the start")
    config.update(client)
    eventually(lambda: restartable.http_get("proxyMode") == "nftables", "mode nftables")
    config.update(client + "mode: ipvs\n")
    eventually(lambda: deprecations() == 2, "the Event at the switch")
    assert {each["regarding"]["kind"] for each in server.events} == {"Node"}


def test_a_rejected_event_is_one_warning(restartable: Cluster, server: ApiServer, tmp_path: Path) -> None:
    server.write_kubeconfig(tmp_path / "kubeconfig")
    server.fail(10, 403, match=lambda request: request.method == "POST")
    flags = (f"--kubeconfig={tmp_path / 'kubeconfig'}", "--manifests=", "--proxy-mode=nftables")
    agent = restartable.start(*flags)
    agent.await_line(lambda line: f" {NOT_CREATED} " in line.text)
    assert status(restartable, "/healthz") == 200
    assert agent.stop() == 0
    assert len(lines(agent, NOT_CREATED)) == 1
