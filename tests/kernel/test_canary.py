"""`ebpfproxy verify --canary`: real connections by each path, in each mode, and paths that do not work."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ebpfproxy.backends.ebpf.attachments import SIDES
from ebpfproxy.lab import Lab
from ebpfproxy.linux.bpf import tc, tcx
from ebpfproxy.linux.bpf.bpf import Link
from ebpfproxy.linux.netlink import links
from tests.kernel.cluster import TCP_TARGET, Cluster, Exposed, elsewhere
from tests.kernel.conftest import MODES

pytestmark = [pytest.mark.kernel, pytest.mark.backends("ebpf", "nftables", "iptables", "ipvs", "userspace")]

BALANCER = ("192.0.2.20", "2001:db8::20")


class Canary(NamedTuple):
    """The command's exit code, its differences, and its connections by client and destination."""

    code: int
    differences: list[Any]
    connections: dict[tuple[str, str], dict[str, str]]

    def states(self, client: str, destination: str = "") -> dict[str, str]:
        """The states of the paths of clients whose name begins so, by destination."""
        return {
            to: each["state"]
            for (name, to), each in self.connections.items()
            if name.startswith(client) and to.startswith(destination)
        }

    @property
    def failing(self) -> set[tuple[str, str]]:
        return {key for key, each in self.connections.items() if each["state"] == "fails"}


def verified(cluster: Cluster, *flags: str, folder: Path | None = None) -> Canary:
    """Run the command with the agent's flags."""
    mode, agent_flags = MODES[cluster.mode]
    done = cluster.ebpfproxy(
        "verify",
        "-o=json",
        f"--proxy-mode={mode}",
        f"--manifests={folder or cluster.folder}",
        f"--hostname-override={cluster.lab.node_name}",
        "--detect-local-mode=InterfaceNamePrefix",
        "--pod-interface-name-prefix=veth",
        *agent_flags,
        *flags,
        check=False,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    by_path = {(each["client"], each["destination"]): each for each in found["canary"]}
    assert len(by_path) == len(found["canary"])
    return Canary(done.returncode, found["differences"], by_path)


def balanced(cluster: Cluster, **spec: Any) -> Exposed:
    """A Service with all kinds of frontends."""
    service = cluster.service(node_port=True, type="LoadBalancer", **spec)
    service.status = {"loadBalancer": {"ingress": [{"ip": address} for address in BALANCER]}}
    return service


def frontends(cluster: Cluster, service: Exposed, cluster_ips: bool = True) -> set[str]:
    addresses = [(f"{BALANCER[0]}", 80), (f"[{BALANCER[1]}]", 80)]
    addresses += [(cluster.node.v4, service.node_port), (f"[{cluster.node.v6}]", service.node_port)]
    if cluster_ips:
        addresses += [(service.v4, 80), (f"[{service.v6}]", 80)]
    return {f"{address}:{port}/TCP" for address, port in addresses}


def loopbacks(cluster: Cluster, service: Exposed) -> set[str]:
    """The frontends at loopback that the mode serves."""
    both = ("127.0.0.1", "[::1]")
    served = {"ebpf": both, "nftables": both, "iptables": both[:1], "userspace": both}
    return {f"{address}:{service.node_port}/TCP" for address in served.get(cluster.mode, ())}


def test_each_path_is_proven(cluster: Cluster) -> None:
    web = balanced(cluster).to(cluster.a)
    found = verified(cluster, f"--canary=default/{web.name}:tcp")
    assert {each["state"] for each in found.connections.values()} == {"works"}, found
    assert set(found.states("node")) == frontends(cluster, web) | loopbacks(cluster, web)
    assert found.states("pod") == dict.fromkeys(frontends(cluster, web), "works")
    outside = frontends(cluster, web, cluster_ips=False)
    assert found.states("outside at eth0") == dict.fromkeys(outside, "works")
    assert {each["service"] for each in found.connections.values()} == {f"default/{web.name}:tcp"}
    reached = {each["endpoint"] for each in found.connections.values()}
    assert reached == {f"{cluster.a.v4}:{TCP_TARGET}", f"[{cluster.a.v6}]:{TCP_TARGET}"}
    assert (found.code, found.differences) == (0, [])


@pytest.mark.same_for("cluster")
def test_without_a_name_each_kind_of_frontend_is_tried_once(cluster: Cluster) -> None:
    web, other = balanced(cluster).to(cluster.a), cluster.service(node_port=True, type="NodePort")
    other.to(cluster.b)
    found = verified(cluster, "--canary")
    assert found.code == 0, found
    assert set(found.states("outside at eth0").values()) == {"works"}
    assert len(found.states("outside at eth0")) == 4
    assert len(found.states("pod")) == 6
    assert len(found.states("node")) == 6 + len(loopbacks(cluster, web))


def test_no_connection_and_no_change_is_left(cluster: Cluster) -> None:
    """The server accepts the connections of sockets, and not the handshake that is reset."""
    web = balanced(cluster).to(cluster.a)
    verified(cluster, "--canary")
    listed = cluster.a.run(["ss", "-tnH", "state", "connected", "exclude", "time-wait"]).stdout
    assert "198.51.100.77" not in listed, listed
    again = verified(cluster, f"--canary=default/{web.name}:tcp")
    assert (again.code, again.differences) == (0, [])


@pytest.mark.same_for("cluster")
def test_udp_is_tried_if_it_is_named(cluster: Cluster) -> None:
    web = balanced(cluster).to(cluster.a)
    found = verified(cluster, f"--canary=default/{web.name}:udp")
    assert found.code == 0, found
    assert all(to.endswith("/UDP") for _, to in found.connections)
    assert found.states("node", f"{web.v4}:53") == {f"{web.v4}:53/UDP": "works"}
    assert found.states("pod", f"{web.v4}:53") == {f"{web.v4}:53/UDP": "works"}
    node_port = f"{cluster.node.v4}:{web.node_port}/UDP"
    assert found.states("outside at eth0", cluster.node.v4) == {node_port: "works"}


@pytest.mark.same_for("cluster")
def test_a_service_whose_endpoint_does_not_answer_proves_nothing(cluster: Cluster) -> None:
    """The pod p has no server."""
    web = balanced(cluster).to(cluster.p)
    found = verified(cluster, f"--canary=default/{web.name}:tcp")
    assert {each["state"] for each in found.connections.values()} == {"unproven"}
    assert "without the Service" in found.connections["node", f"{web.v4}:80/TCP"]["detail"]
    assert found.code == 1


@pytest.mark.same_for("cluster")
def test_a_path_that_should_not_work_is_not_tried(cluster: Cluster) -> None:
    web = balanced(cluster, externalTrafficPolicy="Local").to(elsewhere(cluster.a))
    found = verified(cluster, f"--canary=default/{web.name}:tcp")
    assert set(found.states("outside at eth0").values()) == {"unproven"}
    assert found.states("pod", web.v4) == {f"{web.v4}:80/TCP": "works"}
    assert found.code == 0


@pytest.mark.same_for("cluster")
def test_an_endpoint_that_the_plan_does_not_use_fails(cluster: Cluster, tmp_path: Path) -> None:
    """The command reads manifests that have another endpoint than those of the agent."""
    web = balanced(cluster).to(cluster.a)
    folder = tmp_path / "manifests"
    shutil.copytree(cluster.folder, folder)
    file = folder / f"{web.name}.yaml"
    file.write_text(file.read_text().replace(cluster.a.v4, cluster.b.v4))
    found = verified(cluster, f"--canary=default/{web.name}:tcp", folder=folder)
    assert found.code == 1
    failed = found.connections["node", f"{web.v4}:80/TCP"]
    assert failed["state"] == "fails"
    assert failed["endpoint"] == f"{cluster.a.v4}:{TCP_TARGET}"
    assert found.states("node", f"[{web.v6}]") == {f"[{web.v6}]:80/TCP": "works"}


@pytest.mark.same_for("cluster")
def test_a_service_that_does_not_exist_is_named(cluster: Cluster) -> None:
    done = cluster.ebpfproxy(
        *("verify", f"--manifests={cluster.folder}", f"--hostname-override={cluster.lab.node_name}"),
        *("--canary=default/nothing", f"--proxy-mode={cluster.mode}", *MODES[cluster.mode][1]),
        check=False,
    )
    assert done.returncode == 4
    assert "no Service default/nothing is known" in done.stderr


# --- Paths that do not work ---


_NO_LOOPBACK = "--iptables-localhost-nodeports=false"
"""In mode nftables, the relay of loopback ends with the agent."""


class Broken(NamedTuple):
    """A node whose agent has ended, so that nothing repairs what a test breaks, and its Service."""

    cluster: Cluster
    web: Exposed


@pytest.fixture(scope="module", params=("ebpf", "nftables", "iptables"))
def ended(request: pytest.FixtureRequest) -> Iterator[Broken]:
    with Lab("test-canary", 37) as lab, Cluster(lab, request.param) as cluster:
        yield Broken(cluster, balanced(cluster))


@pytest.fixture
def broken(ended: Broken) -> Broken:
    """What the agent left in the kernel is in sync again."""
    ended.cluster.start(_NO_LOOPBACK, *MODES[ended.cluster.mode][1])
    ended.web.to(ended.cluster.a)
    ended.cluster.end()
    return ended


def nft(cluster: Cluster, text: str) -> None:
    cluster.node.run(["nft", text])


def iptables(cluster: Cluster, *arguments: str) -> None:
    cluster.node.run(["iptables-legacy", "-w", "-t", "nat", *arguments])


def detach_hook(cluster: Cluster) -> None:
    with contextlib.closing(Link.pinned(cluster.lab.bpffs / "links" / "connect4")) as link:
        link.detach()


def detach_uplink(cluster: Cluster) -> None:
    def detach() -> None:
        (ifindex,) = (number for number, name in links.names().items() if name == "eth0")
        if tcx.is_supported():
            tcx.detach(cluster.lab.bpffs / "devices" / f"{ifindex}_ingress")
        else:
            tc.detach(ifindex, SIDES["ingress"])

    cluster.node.call(detach)


LOCAL: dict[str, Callable[[Cluster], None]] = {
    "ebpf": detach_hook,
    "nftables": lambda cluster: nft(cluster, "flush chain ip kube-proxy nat-output-first"),
    "iptables": lambda cluster: iptables(cluster, "-F", "OUTPUT"),
}
"""By mode: breaks the IPv4 path of connections from the node."""

ARRIVING: dict[str, Callable[[Cluster], None]] = {
    "ebpf": detach_uplink,
    "nftables": lambda cluster: nft(cluster, "flush chain ip kube-proxy nat-prerouting-first"),
    "iptables": lambda cluster: iptables(cluster, "-F", "PREROUTING"),
}
"""By mode: breaks the IPv4 path of clients outside."""


def test_a_broken_path_of_the_node_is_named(broken: Broken) -> None:
    LOCAL[broken.cluster.mode](broken.cluster)
    found = verified(broken.cluster, "--canary", _NO_LOOPBACK)
    assert found.code == 1
    failing = {to for client, to in found.failing if client == "node"}
    assert failing == {to for to in found.states("node") if not to.startswith("[")}
    assert len(failing) >= 3
    assert set(found.states("node", "[").values()) == {"works"}
    assert set(found.states("outside at eth0").values()) == {"works"}


def test_a_broken_path_of_clients_outside_is_named(broken: Broken) -> None:
    cluster = broken.cluster
    ARRIVING[cluster.mode](cluster)
    found = verified(cluster, "--canary", _NO_LOOPBACK)
    assert found.code == 1
    outside = {to for client, to in found.failing if client.startswith("outside at eth0")}
    assert {f"{BALANCER[0]}:80/TCP", f"{cluster.node.v4}:{broken.web.node_port}/TCP"} <= outside
    assert set(found.states("node").values()) == {"works"}
    detail = found.connections["outside at eth0 198.51.100.77", f"{BALANCER[0]}:80/TCP"]["detail"]
    assert "does not translate" in detail


@pytest.mark.same_for("ended")
def test_without_the_agent_the_paths_work(broken: Broken) -> None:
    found = verified(broken.cluster, "--canary", _NO_LOOPBACK)
    assert (found.code, found.failing) == (0, set()), found
