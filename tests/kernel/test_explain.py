"""`ebpfproxy explain` on a node with a running agent: the mode, clients, and the kernel's tables."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.lab import Pod, manifests, sockets
from ebpfproxy.model.address import Protocol
from tests.kernel import clients
from tests.kernel.cluster import TCP_TARGET, Cluster, elsewhere
from tests.kernel.conftest import MODES
from tests.support.confined import as_nobody

pytestmark = pytest.mark.kernel


def explain(cluster: Cluster, *arguments: str, manifests: Path | None = None) -> dict[str, Any]:
    """The JSON of the command, with the agent's flags but without the mode, and its exit code as `code`."""
    done = cluster.ebpfproxy(
        "explain",
        "-o=json",
        "--kernel",
        f"--manifests={manifests or cluster.folder}",
        f"--hostname-override={cluster.lab.node_name}",
        "--detect-local-mode=InterfaceNamePrefix",
        "--pod-interface-name-prefix=veth",
        *(flag for flag in MODES[cluster.mode][1] if flag.startswith("--iptables-backend")),
        *arguments,
        check=False,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"code": done.returncode}


def reasons(found: dict[str, Any]) -> set[str]:
    return {step["reason"] for each in found["explanations"] for step in each["steps"]}


def used(found: dict[str, Any]) -> Sequence[str]:
    (explanation,) = found["explanations"]
    return [each["address"] for each in explanation["endpoints"] if each["used"]]


def test_the_kernel_agrees_with_the_plan_in_the_mode_of_the_agent(cluster: Cluster) -> None:
    web = cluster.service(node_port=True, externalTrafficPolicy="Local", type="NodePort")
    web.to(cluster.a, elsewhere(cluster.b))
    found = explain(cluster, f"default/{web.name}")
    assert found["mode"] == cluster.mode
    assert found["works"], found
    assert found["code"] == 0
    assert "Agrees" in reasons(found)
    assert "Disagrees" not in reasons(found)


def test_a_difference_between_kernel_and_plan_is_named_and_ends_with_exit_code_1(
    cluster: Cluster, tmp_path: Path
) -> None:
    web = cluster.service()
    web.to(cluster.a)
    folder = tmp_path / "manifests"
    shutil.copytree(cluster.folder, folder)
    text = (folder / f"{web.name}.yaml").read_text()
    (folder / f"{web.name}.yaml").write_text(text.replace(cluster.a.v4, cluster.b.v4))
    found = explain(cluster, f"{web.v4}:80", manifests=folder)
    assert found["code"] == 1
    (explanation,) = found["explanations"]
    assert explanation["disagreements"]
    assert cluster.mode != "ebpf" or any(cluster.b.v4 in line for line in explanation["disagreements"])


def test_a_frontend_that_only_the_kernel_has_is_named(cluster: Cluster, tmp_path: Path) -> None:
    web = cluster.service()
    web.to(cluster.a)
    folder = tmp_path / "manifests"
    shutil.copytree(cluster.folder, folder)
    (folder / f"{web.name}.yaml").unlink()
    found = explain(cluster, f"{web.v4}:80", manifests=folder)
    assert found["code"] == 1
    (explanation,) = found["explanations"]
    assert any(web.v4 in line for line in explanation["disagreements"])


@pytest.mark.same_for("cluster")
def test_a_pod_may_be_given_by_address_process_or_namespace(cluster: Cluster) -> None:
    web = cluster.service()
    web.to(cluster.a)
    with clients.connected(cluster.node, Protocol.TCP, cluster.a.v4, TCP_TARGET) as direct:
        relayed_from = direct.getsockname()[0]
    idle = cluster.p.popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    try:
        for client in (cluster.p.v4, str(idle.pid), str(cluster.p.netns)):
            found = explain(cluster, f"{web.v4}:80", f"--from={client}")
            assert found["client"]["kind"] == "pod"
            assert cluster.p.v4 in found["client"]["addresses"]
            (explanation,) = found["explanations"]
            (endpoint,) = (each for each in explanation["endpoints"] if each["used"])
            sees = relayed_from if cluster.mode == "userspace" else cluster.p.v4
            assert endpoint["seen"] == [sees]
    finally:
        idle.kill()
        idle.wait()


@pytest.mark.same_for("cluster")
def test_the_node_and_clients_outside_are_recognized(cluster: Cluster) -> None:
    web = cluster.service(node_port=True, type="NodePort", externalTrafficPolicy="Local")
    web.to(elsewhere(cluster.a))
    destination = f"{cluster.node.v4}:{web.node_port}/tcp"
    for client, kind, works in (
        (cluster.node.v4, "node", True),
        ("node", "node", True),
        (cluster.lab.outside.v4, "outside", False),
        ("outside", "outside", False),
    ):
        found = explain(cluster, destination, f"--from={client}")
        assert (found["client"]["kind"], found["works"]) == (kind, works)
    assert "NoneByPolicy" in reasons(found)


def test_the_source_of_a_hairpin_connection_is_the_one_that_the_pod_sees(cluster: Cluster) -> None:
    """Not masqueraded in mode ebpf, where the pod's socket connects to itself."""
    web = cluster.service()
    web.to(cluster.a)
    found = explain(cluster, f"{web.v4}:80", f"--from={cluster.a.v4}")
    (endpoint,) = found["explanations"][0]["endpoints"][:1]
    assert endpoint["masqueraded"] is (cluster.mode != "ebpf")


@pytest.mark.backends("ebpf")
def test_an_affinity_in_the_maps_is_shown(cluster: Cluster) -> None:
    web = cluster.service(sessionAffinity="ClientIP")
    web.to(cluster.a, cluster.b)
    before = explain(cluster, f"{web.v4}:80", f"--from={cluster.p.netns}")
    assert "AffinityUnknown" in reasons(before)
    answer = ask(cluster.p, web.v4)
    for client in (cluster.p.netns, cluster.p.v4):
        after = explain(cluster, f"{web.v4}:80", f"--from={client}")
        (step,) = (s for s in after["explanations"][0]["steps"] if s["reason"] == "AffinityKnown")
        assert getattr(cluster, answer).v4 in step["text"]


@pytest.mark.backends("ebpf")
def test_a_hook_that_is_not_attached_is_named(cluster: Cluster) -> None:
    """With the flags of another agent, which has the same pins: --cgroup-root has none of its hooks."""
    web = cluster.service()
    web.to(cluster.a)
    found = explain(cluster, f"{web.v4}:80", f"--cgroup-root={cluster.lab.cgroup.parent}")
    assert any(line.startswith("connect4: ") for line in found["explanations"][0]["disagreements"])


def test_pings_of_a_cluster_ip_get_the_answer_that_is_explained(cluster: Cluster) -> None:
    web = cluster.service()
    web.to(cluster.a)
    for pod in (cluster.p, cluster.node):
        found = explain(cluster, f"{web.v4}/icmp", f"--from={pod.v4}")
        assert found["works"] is is_answered(pod, web.v4)


def is_answered(pod: Pod, address: str) -> bool:
    try:
        return clients.ping(pod, address) == address
    except PermissionError:  # the node's own packet is rejected where it is sent
        return False


@pytest.mark.backends("ebpf")
def test_a_saved_dump_is_explained_and_compared_with_manifests(cluster: Cluster, tmp_path: Path) -> None:
    web = cluster.service(sessionAffinity="ClientIP")
    web.to(cluster.a, elsewhere(cluster.b), internalTrafficPolicy="Local")
    saved = tmp_path / "dump.json"
    saved.write_text(cluster.ebpfproxy("dump", "all", "-o=json").stdout)
    done = cluster.ebpfproxy("explain", f"{web.v4}:80", f"--from-dump={saved}", "-o=json")
    found = json.loads(done.stdout)
    assert used(found) == [cluster.a.v4]
    assert {"Listed", "NotListed"} >= {each["reason"] for each in found["explanations"][0]["endpoints"]}
    compared = (f"--from-dump={saved}", "--kernel=false")
    assert "Agrees" in reasons(explain(cluster, f"{web.v4}:80", *compared))
    web.to(cluster.a, cluster.b)
    assert "Disagrees" in reasons(explain(cluster, f"{web.v4}:80", *compared))


def ask(pod: Pod, address: str) -> str:
    return pod.call(lambda: sockets.ask(Protocol.TCP, address, 80)).partition(" ")[0]


@pytest.mark.same_for("cluster")
def test_without_root_manifests_are_explained(cluster: Cluster) -> None:
    """Every reading of the kernel would fail."""
    web = cluster.service()
    web.to(cluster.a)
    for path in (cluster.folder.parent, cluster.folder):
        path.chmod(0o755)
    done = cluster.ebpfproxy(
        "explain",
        f"default/{web.name}:tcp",
        f"--manifests={cluster.folder}",
        f"--assume-node={cluster.lab.node_name}",
        before=as_nobody(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ReadyHint" not in done.stdout
    assert "[Connects]" in done.stdout


@pytest.mark.backends("userspace")
def test_a_port_that_the_mode_cannot_forward_is_no_difference(cluster: Cluster) -> None:
    unused = cluster.service()
    port = manifests.port(80, name="sctp", protocol="SCTP")
    cluster.write(
        unused.name,
        manifests.service(unused.name, [unused.v4], [port]),
        manifests.endpoint_slice(unused.name, unused.name, [manifests.endpoint(cluster.a.v4)], [port]),
    )
    found = explain(cluster, f"default/{unused.name}")
    assert not found["works"]
    assert "SctpUnserved" in reasons(found)
    assert "Disagrees" not in reasons(found)


def test_devices_that_keep_their_programs_are_no_sign_of_pods_that_bypass_the_hooks(
    restartable: Cluster,
) -> None:
    """Nor are they differences, when no Service needs them anymore."""
    cluster = restartable
    cluster.start()
    web = cluster.service()
    web.to(cluster.a)
    former = cluster.service()
    port = manifests.port(80, name="sctp", protocol="SCTP")
    cluster.write(former.name, manifests.service(former.name, [former.v4], [port]))
    cluster.write(former.name)
    devices = json.loads(cluster.ebpfproxy("dump", "devices", "-o=json").stdout)
    assert {"lo", cluster.p.device} <= {each["device"] for each in devices}
    found = explain(cluster, f"{web.v4}:80", f"--from={cluster.p.v4}")
    assert "ConnectHook" in reasons(found)
    assert "Disagrees" not in reasons(found)
    flags = (f"--manifests={cluster.folder}", f"--hostname-override={cluster.lab.node_name}")
    done = cluster.ebpfproxy("verify", *flags, check=False)
    assert done.returncode == 0, done.stdout


FORWARD = """table inet closed {
chain forward { type filter hook forward priority filter; policy drop; ct state established,related accept; }
}
"""


@pytest.mark.backends("ebpf")
def test_explain_and_verify_name_rules_that_drop_packets_to_endpoints(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    outside, node_port = cluster.lab.outside, f"{cluster.node.v4}:{web.node_port}"
    flags = (
        "--proxy-mode=ebpf",
        f"--manifests={cluster.folder}",
        f"--hostname-override={cluster.lab.node_name}",
    )
    assert "ForwardDrops" not in reasons(explain(cluster, node_port, f"--from={outside.v4}"))
    cluster.node.run(["nft", "-f", "-"], stdin=FORWARD)
    try:
        got = clients.outcome(outside, clients.TCP, cluster.node.v4, web.node_port, timeout=1.0)
        assert got == clients.SILENT
        found = explain(cluster, node_port, f"--from={outside.v4}")
        assert "ForwardDrops" in reasons(found)
        assert "inet closed" in json.dumps(found)
        of_pod = explain(cluster, f"{web.v4}:80", f"--from={cluster.p.v4}")
        assert "ForwardDrops" not in reasons(of_pod)
        verified = cluster.ebpfproxy("verify", *flags, check=False).stdout
        assert "firewall: " in verified
        assert "inet closed" in verified
    finally:
        cluster.node.run(["nft", "delete", "table", "inet", "closed"])
    cluster.node.run(["iptables", "-P", "FORWARD", "DROP"])
    try:
        found = explain(cluster, node_port, f"--from={outside.v4}")
        assert "ForwardDrops" in reasons(found)
        assert found["code"] == 1
    finally:
        cluster.node.run(["iptables", "-P", "FORWARD", "ACCEPT"])
