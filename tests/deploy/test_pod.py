"""The DaemonSet's pod on a node: it has what it needs, serves, and may be replaced."""

import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

from ebpfproxy.api.watch import load_configuration
from ebpfproxy.errors import ConfigError
from ebpfproxy.linux import mounts
from tests.deploy.building import Built
from tests.deploy.installed import Installed
from tests.kernel.clients import TCP, connected, converse, outcome
from tests.kernel.cluster import Exposed, eventually
from tests.support.kustomize import DEPLOY, one, render

pytestmark = pytest.mark.kernel


def web(installed: Installed) -> Exposed:
    """A Service of the API server, with one endpoint, a."""
    exposed = installed.cluster.service(node_port=True)
    exposed.backends = (installed.cluster.a,)
    return installed.put(exposed)


def answers(installed: Installed, exposed: Exposed) -> list[str]:
    """To a pod, to the node, and to a client outside, which goes by the NodePort."""
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


def test_the_pod_has_all_that_the_mode_ebpf_can_use(installed: Installed) -> None:
    """The root of the host's cgroups included, which is found, not named."""
    container = one(installed.objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    done = installed.run("doctor", *container["args"][1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mode: ebpf (the first that works on this node)" in done.stdout


def test_commands_in_the_pod_show_what_the_kernel_holds(installed: Installed) -> None:
    exposed = web(installed)
    agent = installed.start()
    done = installed.execute("dump", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert f"default/{exposed.name}" in done.stdout
    done = installed.execute("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    agent.stop()


def test_the_node_goes_on_while_a_pod_is_replaced(installed: Installed) -> None:
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
    """So a rollout must not have two pods on a node: maxSurge is 0."""
    web(installed)
    agent = installed.start()
    container = one(installed.objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    done = installed.run(*container["args"], "--healthz-port=0", "--metrics-port=0", "--proxy-mode=ebpf")
    assert done.returncode == 4
    assert "another ebpfproxy" in done.stderr
    agent.stop()


def test_a_bpffs_that_the_pod_had_to_mount_stays_on_the_node(installed: Installed) -> None:
    """A mount of the container's own would go with it, and with that all that is pinned."""
    bare = installed.cluster.lab.folder / "sys-fs-bpf"  # what is mounted there goes with the lab
    bare.mkdir()
    # As systemd has the root of a node: mounts that are made below are seen by all.
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


def test_an_api_server_that_was_not_filled_in_is_rejected() -> None:
    """Rather than go by the ClusterIP, which answers where kube-proxy was, until that node restarts."""
    unfilled = one(render(DEPLOY / "base"), "ConfigMap")["data"]["api-server"]
    with pytest.raises(ConfigError, match=r"--master: .* is not the URL of an API server"):
        load_configuration("", unfilled)


def test_what_the_image_takes(
    request: pytest.FixtureRequest, installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    """The memory that is asked for the pod is enough for the agent and its maps."""
    web(installed)
    agent = installed.start()
    status = Path(f"/proc/{installed.pod.pid()}/status").read_text()
    resident = int(re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)[0]) * 1024
    container = one(installed.objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    (asked,) = re.findall(r"^(\d+)Mi$", container["resources"]["requests"]["memory"])
    assert resident + _MAPS < int(asked) << 20
    agent.stop()
    with capsys.disabled():
        print(f"\n  resident: {resident / 1e6:.0f} MB")
        if "image" in request.node.callspec.id:
            made: Built = request.getfixturevalue("built_image")
            print(f"  image: {made.size / 1e6:.0f} MB, built in {made.seconds:.0f} s")


_MAPS = 185 << 20
"""What the kernel charges for the maps with the default sizes, on two CPUs (docs/operations.md)."""
