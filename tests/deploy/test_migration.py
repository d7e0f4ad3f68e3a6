"""The steps of docs/migration.md on one node: from kube-proxy's rules to the pod, and back.

Mode iptables replaces kube-proxy: it writes the same chains and rules, and keeps them when it ends.
"""

import contextlib
import urllib.request
from collections.abc import Iterator

import pytest

from ebpfproxy.agent.mode_cleanup import ALONE
from ebpfproxy.agent.mode_switch import SWITCHED
from ebpfproxy.lab import Agent
from tests.deploy.installed import Installed
from tests.kernel.clients import TCP, connected, converse, outcome
from tests.kernel.cluster import Exposed, eventually
from tests.support.kustomize import DEPLOY, one, render

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

_LEFT = ALONE


@pytest.fixture
def exposed(installed: Installed) -> Exposed:
    """A Service that kube-proxy served; its pod on this node has ended."""
    web = installed.cluster.service(node_port=True)
    web.backends = (installed.cluster.a,)
    installed.put(web)
    base = installed.objects
    installed.objects = render(DEPLOY / "modes/iptables")
    agent = installed.start()
    agent.await_line(lambda line: _LEFT in line.text, timeout=60)
    assert agent.stop() == 0
    installed.objects = base
    assert "KUBE-SVC-" in rules(installed)
    return web


def rules(installed: Installed) -> str:
    """kube-proxy's rules in iptables-save, without the chain shared with the kubelet and the one that is kept
    as long as connections are open."""
    saved = installed.cluster.node.run(["iptables-save"]).stdout
    kept_chains = ("KUBE-FIREWALL", "KUBE-FORWARD")
    lines = [
        line
        for line in saved.splitlines()
        if "KUBE-" in line and not any(each in line for each in kept_chains)
    ]
    return "\n".join(lines)


def mode(installed: Installed) -> str:
    url = "http://127.0.0.1:10249/proxyMode"
    body: bytes = installed.cluster.node.call(lambda: urllib.request.urlopen(url, timeout=60).read())
    return body.decode()


def pins(installed: Installed) -> list[str]:
    """The agent's pins, which mode ebpf keeps after the agent's end."""
    folder = installed.paths["/sys/fs/bpf"] / "ebpfproxy"
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def switch(agent: Agent, installed: Installed, name: str) -> int:
    """Switch to another mode; the number of lines that the agent had logged before."""
    since = len(agent.lines)
    installed.configure((DEPLOY / name / "config.conf").read_text())
    agent.await_line(lambda line: f" {SWITCHED} " in line.text, since, timeout=90)
    return since


@contextlib.contextmanager
def open_connections(installed: Installed, web: Exposed) -> Iterator[None]:
    """A pod's connection to the ClusterIP and an external one to the NodePort work before and after the
    block."""
    cluster = installed.cluster
    with (
        connected(cluster.p, TCP, web.v4, 80) as inside,
        connected(cluster.lab.outside, TCP, cluster.node.v4, web.node_port) as outside,
    ):
        assert [converse(inside), converse(outside)] == ["a", "a"]
        yield
        assert [converse(inside), converse(outside)] == ["a", "a"]


def serves(installed: Installed, web: Exposed) -> bool:
    cluster = installed.cluster
    return (
        outcome(cluster.p, TCP, web.v4, 80)
        == outcome(cluster.lab.outside, TCP, cluster.node.v4, web.node_port)
        == "a"
    )


def test_no_connection_is_lost_from_kube_proxy_to_the_pod_and_back(
    request: pytest.FixtureRequest, installed: Installed, exposed: Exposed
) -> None:
    with open_connections(installed, exposed):
        agent = installed.start()
        eventually(lambda: not rules(installed), "kube-proxy's rules are removed")
        assert mode(installed) == "ebpf"
        assert serves(installed, exposed)
    with open_connections(installed, exposed):
        since = switch(agent, installed, "modes/iptables")
        assert mode(installed) == "iptables"
        assert serves(installed, exposed)
        assert "KUBE-SVC-" in rules(installed)
    if request.config.getoption(
        "--image"
    ):  # otherwise skipped: conntrack keeps closed connections for half a minute
        agent.await_line(lambda line: _LEFT in line.text, since, timeout=120)
        assert not pins(installed)
    assert agent.stop() == 0
    assert serves(installed, exposed), "the remaining rules serve until kube-proxy starts"


def debug(installed: Installed) -> None:
    """Start the next pods like `kubectl debug node --profile=sysadmin`: the node's files are below /host,
    without the DaemonSet's volumes."""
    spec = one(installed.objects, "DaemonSet")["spec"]["template"]["spec"]
    wanted = {"bpffs": "/host/sys/fs/bpf", "cgroup": "/host/sys/fs/cgroup"}
    spec["containers"][0]["volumeMounts"] = [
        {"name": name, "mountPath": path} for name, path in wanted.items()
    ]
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] in wanted]


def test_doctor_in_a_debug_pod_works_before_the_migration(installed: Installed) -> None:
    debug(installed)
    done = installed.run("doctor", "--bpffs-root=/host/sys/fs/bpf/ebpfproxy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mode: ebpf" in done.stdout


def test_cleanup_in_a_debug_pod_removes_all_state(installed: Installed, exposed: Exposed) -> None:
    agent = installed.start()
    eventually(lambda: not rules(installed), "kube-proxy's rules are removed")
    assert agent.stop() == 0
    assert pins(installed)
    debug(installed)
    done = installed.run("cleanup", "--bpffs-root=/host/sys/fs/bpf/ebpfproxy")
    assert done.returncode == 0, done.stderr
    assert not pins(installed)
    assert outcome(installed.cluster.p, TCP, exposed.v4, 80, 0.5) != "a"
