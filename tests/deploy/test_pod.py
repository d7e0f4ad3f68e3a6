"""The DaemonSet's pod on a node: it has all it needs, serves, and can be replaced."""

import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

from ebpfproxy.api.watch import load_configuration
from ebpfproxy.errors import ConfigError
from ebpfproxy.linux import mounts
from tests.deploy.building import MACHINE, Built
from tests.deploy.installed import Installed
from tests.kernel.clients import TCP, connected, converse, outcome
from tests.kernel.cluster import Exposed, eventually
from tests.support.kustomize import DEPLOY, one, render

pytestmark = pytest.mark.kernel


def web(installed: Installed) -> Exposed:
    """A Service from the API server with the endpoint a."""
    exposed = installed.cluster.service(node_port=True)
    exposed.backends = (installed.cluster.a,)
    return installed.put(exposed)


def answers(installed: Installed, exposed: Exposed) -> list[str]:
    """The replies to a pod, to the node, and to an external client at the NodePort."""
    cluster = installed.cluster
    return [
        outcome(cluster.p, TCP, exposed.v4, 80),
        outcome(cluster.node, TCP, exposed.v6, 80),
        outcome(cluster.lab.outside, TCP, cluster.node.v4, exposed.node_port),
    ]


def get(installed: Installed, path: str, port: int) -> str:
    url = f"http://127.0.0.1:{port}{path}"
    body: bytes = installed.cluster.node.call(lambda: urllib.request.urlopen(url, timeout=60).read())
    return body.decode()


def test_the_pod_serves_a_service_of_the_cluster(installed: Installed) -> None:
    exposed = web(installed)
    agent = installed.start()
    assert answers(installed, exposed) == ["a", "a", "a"]
    assert get(installed, "/proxyMode", 10249) == "ebpf"
    probe = one(installed.objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]
    assert "lastUpdated" in get(installed, probe["httpGet"]["path"], 10256)
    assert agent.stop() == 0


def test_the_pod_has_all_features_of_mode_ebpf(installed: Installed) -> None:
    """This includes the host's cgroup root, which is detected, not configured."""
    container = one(installed.objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    done = installed.run("doctor", *container["args"][1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mode: ebpf (the first that works on this node)" in done.stdout


def test_dump_and_doctor_work_in_the_pod(installed: Installed) -> None:
    exposed = web(installed)
    agent = installed.start()
    done = installed.execute("dump", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert f"default/{exposed.name}" in done.stdout
    done = installed.execute("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    agent.stop()


def test_the_node_keeps_serving_while_the_pod_is_replaced(installed: Installed) -> None:
    exposed = web(installed)
    cluster = installed.cluster
    installed.start()
    installed.kill()
    with connected(cluster.p, TCP, exposed.v4, 80) as open_before:
        assert answers(installed, exposed) == ["a", "a", "a"]
        agent = installed.start()
        assert converse(open_before) == "a"
    exposed.backends = (cluster.b,)
    installed.put(exposed)
    eventually(lambda: answers(installed, exposed) == ["b", "b", "b"], "the change")
    assert agent.stop() == 0


def test_a_second_agent_on_the_node_is_rejected(installed: Installed) -> None:
    """Therefore a rollout must not start two pods on a node: maxSurge is 0."""
    web(installed)
    agent = installed.start()
    container = one(installed.objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    done = installed.run(*container["args"], "--healthz-port=0", "--metrics-port=0", "--proxy-mode=ebpf")
    assert done.returncode == 4
    assert "another ebpfproxy" in done.stderr
    agent.stop()


def test_a_bpffs_mounted_by_the_pod_stays_on_the_node(installed: Installed) -> None:
    """A mount inside the container would end with the container, and with it all pins."""
    bare = installed.cluster.lab.folder / "sys-fs-bpf"  # the lab removes mounts below its folder
    bare.mkdir()
    # systemd makes a node's root mount shared, too: later mounts below are visible to all namespaces.
    subprocess.run(["mount", "--bind", bare, bare], check=True)
    subprocess.run(["mount", "--make-shared", bare], check=True)
    installed.paths["/sys/fs/bpf"] = bare
    exposed = web(installed)
    agent = installed.start()
    assert "the bpffs is this container's own" not in agent.log()
    installed.kill()
    assert mounts.is_bpffs(bare)
    assert (bare / "ebpfproxy").is_dir()
    assert answers(installed, exposed) == ["a", "a", "a"]


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_the_pod_serves_in_another_mode(installed: Installed, mode: str) -> None:
    installed.objects = render(DEPLOY / "modes" / mode)
    exposed = web(installed)
    agent = installed.start()
    assert answers(installed, exposed) == ["a", "a", "a"]
    assert get(installed, "/proxyMode", 10249) == mode
    agent.stop()


def test_the_placeholder_for_the_api_server_is_rejected() -> None:
    """The ClusterIP is not used instead: it would work until the node restarts, while kube-proxy's rules
    remain."""
    unfilled = one(render(DEPLOY / "base"), "ConfigMap")["data"]["api-server"]
    with pytest.raises(ConfigError, match=r"--master: .* is not the URL of an API server"):
        load_configuration("", unfilled)


def test_the_memory_request_is_sufficient(
    request: pytest.FixtureRequest, installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pod's memory request is sufficient for the agent and its maps."""
    web(installed)
    agent = installed.start()
    status = Path(f"/proc/{installed.pod.pid()}/status").read_text()
    resident = int(re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)[0]) * 1024
    container = one(installed.objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    (requested,) = re.findall(r"^(\d+)Mi$", container["resources"]["requests"]["memory"])
    assert resident + _MAPS < int(requested) << 20
    agent.stop()
    with capsys.disabled():
        print(f"\n  resident: {resident / 1e6:.0f} MB")
        variant = request.node.callspec.params["image"]
        if variant != MACHINE:
            made: Built = request.getfixturevalue("built_images")[variant]
            print(f"  image: {made.size / 1e6:.0f} MB, built in {made.seconds:.0f} s")


_MAPS = 185 << 20
"""Bytes that the kernel charges for maps of the default sizes with two CPUs (docs/operations.md)."""
