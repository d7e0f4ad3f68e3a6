"""The agent with an API server that compacts its history, becomes unreachable and returns."""

import contextlib
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ebpfproxy.agent.daemon import NODE_MISSING
from ebpfproxy.agent.mode_switch import SWITCH_LATER, SWITCHED
from ebpfproxy.api.outage import UNREACHABLE
from ebpfproxy.bench.load import Load
from ebpfproxy.lab import Pod, manifests
from ebpfproxy.lab.agent import is_sync
from ebpfproxy.linux.netns import netns
from tests.kernel.clients import REFUSED, TCP, answers, outcome
from tests.kernel.cluster import TCP_TARGET, Cluster, Exposed, eventually
from tests.support.apiserver import ApiServer, Request

pytestmark = pytest.mark.kernel


@pytest.fixture
def server(restartable: Cluster) -> Iterator[ApiServer]:
    """An API server on the node's 127.0.0.1."""
    server = ApiServer()
    server.put(manifests.node(restartable.lab.node_name, [restartable.node.v4, restartable.node.v6]))
    start(restartable, server)
    try:
        yield server
    finally:
        restartable.end()
        server.stop()


def start(restartable: Cluster, server: ApiServer) -> None:
    with netns.entered(restartable.node.netns):
        server.start()


def run(restartable: Cluster, server: ApiServer, folder: Path, *flags: str) -> None:
    """Start the agent with this server and wait for its first sync."""
    kubeconfig = folder / "kubeconfig"
    server.write_kubeconfig(kubeconfig)
    restartable.start("--manifests=", f"--kubeconfig={kubeconfig}", *flags)


def put(server: ApiServer, web: Exposed, *backends: Pod) -> Exposed:
    web.backends = backends
    for entry in web.objects():
        server.put(entry)
    return web


def answer(restartable: Cluster, web: Exposed) -> str:
    return outcome(restartable.p, TCP, web.v4, 80, 1.0)


def test_services_from_an_api_server_are_served(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    before = put(server, restartable.service(), restartable.a)
    run(restartable, server, tmp_path)
    assert answer(restartable, before) == "a"
    later = put(server, restartable.service(node_port=True), restartable.a, restartable.b)
    eventually(lambda: answer(restartable, later) in ("a", "b"), "the later Service is served")
    eventually(lambda: set(answers(restartable.p, TCP, later.v4, 80)) == {"a", "b"}, "both endpoints")
    assert outcome(restartable.node, TCP, "127.0.0.1", later.node_port) in ("a", "b")


def test_healthz_is_503_without_the_node_and_200_with_it(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    """As in kube-proxy: load balancers must not use a node whose Node object is gone."""
    name, addresses = restartable.lab.node_name, [restartable.node.v4, restartable.node.v6]

    def statuses() -> list[int]:
        return [health(restartable, path) for path in ("healthz", "livez")]

    server.delete("Node", "", name)
    run(restartable, server, tmp_path)
    assert statuses() == [503, 200]
    server.put(manifests.node(name, addresses))
    eventually(lambda: statuses() == [200, 200], "the Node is known")
    server.delete("Node", "", name)
    eventually(lambda: statuses() == [503, 200], "the Node is gone")


def test_host_ports_of_the_pods_of_this_node_are_served(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    for pod, node, host_port in (
        (restartable.a, restartable.lab.node_name, 8443),
        (restartable.b, "elsewhere", 8444),
    ):
        ports = [{"containerPort": TCP_TARGET, "hostPort": host_port}]
        server.put(manifests.pod(pod.name, node, [pod.v4], ports))
    run(restartable, server, tmp_path, "--host-ports")
    assert outcome(restartable.lab.outside, TCP, restartable.node.v4, 8443) == "a"
    assert outcome(restartable.lab.outside, TCP, restartable.node.v4, 8444) == REFUSED
    server.delete("Pod", "default", restartable.a.name)
    eventually(
        lambda: outcome(restartable.lab.outside, TCP, restartable.node.v4, 8443) == REFUSED, "the deletion"
    )


def test_a_deletion_missed_by_the_watch_is_applied_after_a_new_list(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    """Regression: cilium #48050. The object was deleted while the connection was down, and the history was
    compacted."""
    gone, stays = (put(server, restartable.service(), restartable.a) for _ in range(2))
    run(restartable, server, tmp_path)
    assert answer(restartable, gone) == answer(restartable, stays) == "a"
    server.stop()
    server.delete("Service", "default", gone.name)
    server.put(endpoints_of(stays, restartable.b))
    server.compact()
    start(restartable, server)
    eventually(lambda: answer(restartable, stays) == "b", "the change", patience=20)
    eventually(lambda: answer(restartable, gone) not in ("a", "b"), "the deletion", patience=20)


def endpoints_of(web: Exposed, *backends: Pod) -> manifests.Object:
    web.backends = backends
    return web.objects()[1]


def test_restart_while_the_api_server_is_unreachable_changes_nothing(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    """Regression: cilium #26912 and others, where a starting agent deleted state that it had not listed
    yet."""
    web = put(server, restartable.service(node_port=True), restartable.a, restartable.b)
    run(restartable, server, tmp_path)
    restartable.agent.kill()
    server.stop()
    kubeconfig = f"--kubeconfig={tmp_path / 'kubeconfig'}"
    restartable.launch("--manifests=", kubeconfig)
    restartable.agent.await_line(lambda line: "WARNING" in line.text or "ERROR" in line.text)
    assert set(answers(restartable.p, TCP, web.v4, 80)) == {"a", "b"}
    start(restartable, server)
    restartable.agent.await_sync()
    assert set(answers(restartable.p, TCP, web.v4, 80)) == {"a", "b"}
    assert outcome(restartable.p, TCP, restartable.node.v4, web.node_port) in ("a", "b")


def test_agent_waiting_for_the_api_server_is_live_not_ready_and_keeps_a_mode_switch(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    web = put(server, restartable.service(), restartable.a)
    server.stop()
    kubeconfig, configuration = tmp_path / "kubeconfig", tmp_path / "config.conf"
    server.write_kubeconfig(kubeconfig)

    def configure(mode: str) -> None:
        written = configuration.with_suffix(".new")
        written.write_text(f"{KIND}\nmode: {mode}\nclientConnection: {{kubeconfig: {kubeconfig}}}\n")
        written.rename(configuration)

    configure("nftables")  # its masqueradeBit differs from the one for iptables
    agent = restartable.launch("--manifests=", f"--config={configuration}")
    agent.await_line(lambda line: UNREACHABLE in line.text)
    configure("iptables")
    agent.await_line(lambda line: SWITCH_LATER in line.text)
    assert (health(restartable, "livez"), health(restartable, "readyz")) == (200, 503)
    start(restartable, server)
    agent.await_line(lambda line: f" {SWITCHED} mode=iptables " in line.text)
    assert (health(restartable, "livez"), health(restartable, "readyz")) == (200, 200)
    assert answer(restartable, web) == "a"
    assert not any("next start" in line.text for line in agent.lines)


KIND = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
iptables: {masqueradeBit: 14}
nftables: {masqueradeBit: 20}"""


def health(restartable: Cluster, path: str) -> int:
    """The HTTP status that the agent's health server returns."""

    def ask() -> int:
        try:
            return int(urllib.request.urlopen(f"http://127.0.0.1:10256/{path}", timeout=60).status)
        except urllib.error.HTTPError as rejection:
            return rejection.code

    return restartable.node.call(ask)


def test_no_connection_fails_while_the_api_server_is_unreachable(
    request: pytest.FixtureRequest, restartable: Cluster, server: ApiServer, load: Load, tmp_path: Path
) -> None:
    """The API server is unreachable all the time; the agent is killed and restarted. --connects=N for
    longer."""
    web = put(server, restartable.service(), restartable.a, restartable.b)
    run(restartable, server, tmp_path)
    server.stop()
    targets = load.targets("away", [(web.v4, 80), (web.v6, 80)])
    running = load.start_churn(restartable.p, targets, count=request.config.getoption("--connects"))
    try:
        while running.poll() is None:
            restartable.agent.kill()
            restartable.launch("--manifests=", f"--kubeconfig={tmp_path / 'kubeconfig'}")
            restartable.agent.await_line(lambda line: UNREACHABLE in line.text)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(10)
    finally:
        report = load.end_churn(running)
    assert report["attempts"] >= request.config.getoption("--connects")
    assert report["errors"] == {}


def test_restart_with_a_late_endpoint_slice_list_loses_no_endpoint(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    """Regression: cilium #26912. Services are listed at once, their EndpointSlices only after a while."""
    web = put(server, restartable.service(), restartable.a, restartable.b)
    run(restartable, server, tmp_path)
    restartable.agent.kill()
    go = threading.Event()

    def hold(request: Request) -> None:
        if request.path.endswith("/endpointslices"):
            go.wait(20)

    server.before = hold
    asked = len(server.requests)
    kubeconfig = f"--kubeconfig={tmp_path / 'kubeconfig'}"
    restartable.launch("--manifests=", kubeconfig)
    try:
        eventually(
            lambda: any(r.watch and r.path.endswith("/services") for r in server.requests[asked:]),
            "Services are listed and watched",
            patience=20,
        )
        for _ in range(3):
            assert set(answers(restartable.p, TCP, web.v4, 80)) == {"a", "b"}
    finally:
        go.set()
    restartable.agent.await_sync()
    assert set(answers(restartable.p, TCP, web.v4, 80)) == {"a", "b"}


def test_restart_with_a_late_node_object_closes_no_node_port(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    """With --nodeport-addresses=primary: the addresses are known only from the Node object."""
    web = put(server, restartable.service(node_port=True), restartable.a, restartable.b)
    primary = ("--nodeport-addresses=primary", "--manifests=", f"--kubeconfig={tmp_path / 'kubeconfig'}")
    server.write_kubeconfig(tmp_path / "kubeconfig")
    restartable.start(*primary)
    restartable.agent.kill()
    go = threading.Event()

    def hold(request: Request) -> None:
        if request.path.endswith("/nodes"):
            go.wait(20)

    def dials() -> None:
        assert outcome(restartable.p, TCP, restartable.node.v4, web.node_port) in ("a", "b")

    server.before = hold
    asked = len(server.requests)
    restartable.launch(*primary)
    try:
        eventually(lambda: watched(server, asked), "Services and EndpointSlices are listed and watched", 20)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            dials()
        assert not any(map(is_sync, restartable.agent.lines))
    finally:
        go.set()
    restartable.agent.await_sync()
    dials()


def watched(server: ApiServer, since: int) -> bool:
    watches = [request.path for request in server.requests[since:] if request.watch]
    return all(any(path.endswith(kind) for path in watches) for kind in ("/services", "/endpointslices"))


def test_without_permission_to_read_the_node_object_services_are_served_after_a_timeout(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    web = put(server, restartable.service(), restartable.a)
    server.fail(10_000, 403, match=lambda request: request.path.endswith("/nodes"))
    run(restartable, server, tmp_path)
    assert any(NODE_MISSING in line.text for line in restartable.agent.lines)
    assert answer(restartable, web) == "a"


# The API server behind the Service default/kubernetes


@contextlib.contextmanager
def api_by_service(restartable: Cluster, server: ApiServer, folder: Path) -> Iterator[Path]:
    """A relay from port 6443 of the node's address to the server, and a kubeconfig for 10.96.240.1:443."""
    with netns.entered(restartable.node.netns):
        listener = socket.create_server((restartable.node.v4, 6443))

        def upstream() -> socket.socket:
            with netns.entered(restartable.node.netns):
                return socket.create_connection(("127.0.0.1", server.port))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def relay() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server_end = upstream()
                for pair in ((client, server_end), (server_end, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=relay, daemon=True).start()
    kubeconfig = folder / "by-service"
    server.write_kubeconfig(kubeconfig)
    config = yaml.safe_load(kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    cluster["server"] = "https://10.96.240.1:443"
    cluster.pop("certificate-authority-data")
    cluster["insecure-skip-tls-verify"] = True
    kubeconfig.write_text(yaml.safe_dump(config))
    try:
        yield kubeconfig
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def kubernetes(*addresses: str) -> list[manifests.Object]:
    name = "kubernetes"
    return [
        manifests.service(name, ["10.96.240.1"], [manifests.port(443, name="https")]),
        manifests.endpoint_slice(name, name, addresses, [manifests.port(6443, name="https")], family="IPv4"),
    ]


def test_agent_reaches_the_api_server_while_its_service_has_no_endpoints(
    restartable: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    """Regression: calico ee3dc51152. An agent that reaches the API server at its ClusterIP would reject its
    own connections once default/kubernetes has no endpoints, and would never receive new ones."""
    with api_by_service(restartable, server, tmp_path) as kubeconfig:
        for entry in kubernetes(restartable.node.v4):
            server.put(entry)
        run(restartable, server, tmp_path)
        restartable.agent.kill()
        restartable.start("--manifests=", f"--kubeconfig={kubeconfig}")
        web = put(server, restartable.service(), restartable.a)
        eventually(lambda: answer(restartable, web) == "a", "served with the API server's ClusterIP")
        for entry in kubernetes():
            server.put(entry)
        server.put(endpoints_of(web))
        eventually(lambda: answer(restartable, web) == REFUSED, "both changes are in force")
        server.drop_connections()
        server.put(endpoints_of(web, restartable.b))
        eventually(
            lambda: answer(restartable, web) == "b", "changes still arrive from the API server", patience=8
        )
