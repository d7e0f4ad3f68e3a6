"""`ebpfproxy doctor` recognizes network plugins and service proxies by what they leave on a node."""

import contextlib
import dataclasses
import http.server
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.config import Config
from ebpfproxy.diagnose.doctor import plugin_settings, report, traces
from ebpfproxy.diagnose.doctor.check import Check, State
from ebpfproxy.diagnose.doctor.other_proxies import LEFT_OVER, PROXY
from ebpfproxy.diagnose.doctor.plugin_settings import LOCAL_TRAFFIC, MASQUERADE_BIT
from ebpfproxy.linux import processes
from ebpfproxy.linux.bpf import tc, tcx
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netlink import local_routes
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import parse_address, parse_network
from ebpfproxy.plan.service_plan import DetectLocal
from tests.kernel import plugin_traces
from tests.kernel.plugin_traces import Node
from tests.support.bpf_place import BpfPlace, bpf_place, load_program
from tests.support.kube_proxy import CAPTURED
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

CONFIG = Config(hostname_override="here")
NETWORK_PLUGIN = "network plugin"
SCHED_CLS = 3


class Doctor:
    """A node, in whose network namespace the calling thread is."""

    def __init__(self, place: BpfPlace, space: Namespace, node: Node, folder: Path) -> None:
        self.place = place
        self.space = space
        self.node = node
        self.folder = folder

    def checks(self, mode: str = "nftables", **options: Any) -> dict[str, Check]:
        """The rows about the node, by feature. `options`: of the configuration."""
        roots = {"cgroup_root": self.place.cgroup, "bpffs_root": self.place.bpffs}
        config = dataclasses.replace(CONFIG, **{**roots, **options})
        found = traces.read(config, self.node.cni)
        return {each.feature: each for each in report.node_checks(found, config, mode)}

    def plugins(self) -> list[str]:
        return [name for name in self.checks() if name.startswith(f"{NETWORK_PLUGIN} ")]


@pytest.fixture(scope="module")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture
def doctor(place: BpfPlace, tmp_path: Path) -> Iterator[Doctor]:
    with namespace("doctor") as space, space.entered():
        netns.set_loopback_up()
        with plugin_traces.node(tmp_path / "net.d", place.cgroup) as node:
            yield Doctor(place, space, node, tmp_path)


Build = Callable[[Node], None]
PLUGINS: Mapping[str, tuple[Build, str]] = {
    "flannel": (plugin_traces.flannel, "flannel"),
    "calico-iptables": (plugin_traces.calico_iptables, "Calico (iptables)"),
    "calico-nftables": (plugin_traces.calico_nftables, "Calico (nftables)"),
    "calico-ebpf": (plugin_traces.calico_ebpf, "Calico (eBPF)"),
    "cilium": (plugin_traces.cilium, "Cilium (without kube-proxy replacement)"),
    "cilium-replacing": (plugin_traces.cilium_replacing, "Cilium (with kube-proxy replacement)"),
    "aws": (plugin_traces.aws, "Amazon VPC CNI"),
    "kindnet": (plugin_traces.kindnet, "kindnet"),
    "kindnet-nftables": (plugin_traces.kindnet_nftables, "kindnet"),
    "kube-router": (plugin_traces.kube_router, "kube-router"),
}
REPLACING = {"calico-ebpf": "bpfEnabled: false", "cilium-replacing": "kubeProxyReplacement=false"}
SETTINGS = {
    "flannel": "--detect-local-mode=NodeCIDR",
    "calico-iptables": "--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=cali",
    "cilium": "--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=lxc",
    "aws": "--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=eni",
    "kindnet": "--detect-local-mode=NodeCIDR",
}
each_plugin = pytest.mark.parametrize("name", PLUGINS)


@each_plugin
def test_a_plugin_is_recognized_and_no_other_one(doctor: Doctor, name: str) -> None:
    build, title = PLUGINS[name]
    build(doctor.node)
    checks = doctor.checks()
    assert [each for each in checks if each.startswith(NETWORK_PLUGIN)] == [f"{NETWORK_PLUGIN} {title}"]
    check = checks[f"{NETWORK_PLUGIN} {title}"]
    assert check.state is State.PRESENT
    assert "set" in check.remedy or "--" in check.remedy
    assert not [each for each in checks if each.startswith("reading ")], "everything can be read"


@each_plugin
def test_a_plugin_is_recognized_without_its_cni_file(doctor: Doctor, name: str) -> None:
    """The agent's pod does not mount /etc/cni."""
    build, title = PLUGINS[name]
    build(doctor.node)
    shutil.rmtree(doctor.node.cni)
    assert doctor.plugins() == [f"{NETWORK_PLUGIN} {title}"]


@each_plugin
def test_only_a_plugin_that_replaces_kube_proxy_is_another_proxy(doctor: Doctor, name: str) -> None:
    PLUGINS[name][0](doctor.node)
    check = doctor.checks()[PROXY]
    assert check.state is (State.REQUIRED if name in REPLACING else State.PRESENT)
    assert REPLACING.get(name, "") in check.remedy


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_for_a_plugin_are_proposed_and_then_accepted(doctor: Doctor, name: str) -> None:
    PLUGINS[name][0](doctor.node)
    check = doctor.checks()[LOCAL_TRAFFIC]
    assert check.state is State.OPTIONAL
    assert check.remedy.startswith(f"set {SETTINGS[name]};")
    mode, _, prefix = SETTINGS[name].removeprefix("--detect-local-mode=").partition(" ")
    proposed: dict[str, Any] = {
        "detect_local_mode": DetectLocal(mode),
        "pod_interface_name_prefix": prefix.partition("=")[2],
    }
    assert doctor.checks(**proposed)[LOCAL_TRAFFIC].state is State.PRESENT
    by_cidr = doctor.checks(cluster_cidr=(parse_network("10.244.0.0/16"),))
    assert by_cidr[LOCAL_TRAFFIC].state is State.PRESENT


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("calico-iptables", {"detect_local_mode": DetectLocal.NODE_CIDR}),
        ("aws", {"detect_local_mode": DetectLocal.NODE_CIDR}),
        (
            "cilium",
            {"detect_local_mode": DetectLocal.INTERFACE_NAME_PREFIX, "pod_interface_name_prefix": "cali"},
        ),
    ],
)
def test_settings_for_another_plugin_are_reported(
    doctor: Doctor, name: str, options: Mapping[str, Any]
) -> None:
    PLUGINS[name][0](doctor.node)
    assert doctor.checks(**options)[LOCAL_TRAFFIC].state is State.OPTIONAL


def test_calico_that_only_has_policies_leaves_local_traffic_to_the_plugin(doctor: Doctor) -> None:
    plugin_traces.aws(doctor.node)
    doctor.node.iptables("*filter\n:cali-FORWARD - [0:0]\n-A FORWARD -j cali-FORWARD\nCOMMIT\n")
    assert doctor.plugins() == [f"{NETWORK_PLUGIN} Calico (iptables)", f"{NETWORK_PLUGIN} Amazon VPC CNI"]
    assert "cali" not in doctor.checks()[LOCAL_TRAFFIC].remedy


def test_remains_of_a_plugin_do_not_affect_the_settings(doctor: Doctor) -> None:
    """flannel's devices and rules stay when another plugin replaces it."""
    plugin_traces.flannel(doctor.node)
    shutil.rmtree(doctor.node.cni)
    plugin_traces.calico_iptables(doctor.node)
    assert doctor.plugins() == [f"{NETWORK_PLUGIN} flannel", f"{NETWORK_PLUGIN} Calico (iptables)"]
    assert doctor.checks()[LOCAL_TRAFFIC].remedy.startswith(f"set {SETTINGS['calico-iptables']};")


@pytest.mark.parametrize(
    ("name", "bit", "free"),
    [("calico-iptables", 16, 14), ("aws", 7, 14), ("cilium", 8, 14), ("calico-ebpf", 20, 14)],
)
def test_a_masquerade_bit_of_the_plugin_is_reported_with_a_free_one(
    doctor: Doctor, name: str, bit: int, free: int
) -> None:
    PLUGINS[name][0](doctor.node)
    check = doctor.checks(iptables_masquerade_bit=bit)[MASQUERADE_BIT]
    assert check.state is State.REQUIRED
    assert check.remedy == f"set --iptables-masquerade-bit={free}"
    assert doctor.checks(iptables_masquerade_bit=free)[MASQUERADE_BIT].state is State.PRESENT


def test_bits_in_the_rules_of_a_plugin_count(doctor: Doctor) -> None:
    """The mask of Calico, and the mark of the Amazon VPC CNI, can be configured."""
    plugin_traces.aws(doctor.node)
    doctor.node.iptables("*nat\n-A AWS-CONNMARK-CHAIN-0 -j CONNMARK --set-xmark 0x4000/0x4000\nCOMMIT\n")
    check = doctor.checks()[MASQUERADE_BIT]
    assert (check.state, check.remedy) == (State.REQUIRED, "set --iptables-masquerade-bit=13")


def test_redirection_is_reported_where_a_plugin_needs_the_stack(doctor: Doctor) -> None:
    plugin_traces.flannel(doctor.node)
    redirect = plugin_settings.REDIRECT
    assert doctor.checks("ebpf", ebpf_redirect=True)[redirect].state is State.PRESENT
    plugin_traces.calico_iptables(doctor.node)
    assert doctor.checks("ebpf", ebpf_redirect=True)[redirect].state is State.REQUIRED
    checks = doctor.checks("ebpf")
    assert not {redirect, LOCAL_TRAFFIC, MASQUERADE_BIT} & checks.keys()


def test_programs_of_tcx_links_are_found(doctor: Doctor) -> None:
    if not tcx.is_supported():
        pytest.skip("this kernel has no tcx")
    doctor.node.device("eth1")
    doctor.node.tcx_link("eth1", "cil_from_netdev")
    assert doctor.plugins() == [f"{NETWORK_PLUGIN} Cilium (without kube-proxy replacement)"]


def test_a_plain_node_has_no_plugin_and_no_other_proxy(doctor: Doctor) -> None:
    """Names that only resemble those of plugins count for nothing."""
    doctor.node.bridge("cni0")
    doctor.node.device("veth12345678", "caliper", "lxc0123", "enitop", "eth1")
    doctor.node.cni_file("10-bridge.conflist", "mynet", "bridge", "portmap")
    doctor.node.iptables("*filter\n:MY-CHAIN - [0:0]\n-A FORWARD -j MY-CHAIN\nCOMMIT\n")
    doctor.node.socket_program("my_connect4")
    checks = doctor.checks(cluster_cidr=(parse_network("10.244.0.0/16"),))
    assert {each.state for each in checks.values()} == {State.PRESENT}
    path = doctor.node.cni / "10-bridge.conflist"
    assert checks[NETWORK_PLUGIN].detail == f"not a known one: {path} has bridge, portmap"
    assert checks.keys() == {NETWORK_PLUGIN, LOCAL_TRAFFIC, PROXY, LEFT_OVER}


def test_a_node_without_cni_configuration_is_reported(doctor: Doctor) -> None:
    doctor.node.cni.mkdir()
    check = doctor.checks()[NETWORK_PLUGIN]
    assert check.state is State.OPTIONAL
    assert check.detail == "there is no CNI configuration, and no trace of a known plugin"


def test_a_folder_that_does_not_exist_is_reported(doctor: Doctor) -> None:
    check = doctor.checks()["reading CNI files"]
    assert (check.state, check.remedy) == (State.OPTIONAL, "correct --cni-config-dir")


def test_what_cannot_be_read_is_reported(doctor: Doctor) -> None:
    plugin_traces.cilium(doctor.node)
    checks = doctor.checks(cgroup_root=doctor.folder / "missing")
    assert f"{NETWORK_PLUGIN} Cilium" in checks, "whether it replaces kube-proxy is unknown"
    check = checks["reading programs of the cgroup"]
    assert check.state is State.OPTIONAL
    assert "cannot open the cgroup" in check.detail
    assert check.remedy


# kube-proxy


@contextlib.contextmanager
def running(doctor: Doctor, name: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with that name in the node's network namespace: a copy of sleep."""
    executable = doctor.folder / name
    shutil.copy(str(shutil.which("sleep")), executable)
    process = subprocess.Popen(["ip", "netns", "exec", doctor.space.name, executable, "600"])
    try:
        while name not in {each.name for each in processes.in_own_netns() if each.pid == process.pid}:
            assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def answering(mode: str, metrics: str = "") -> Iterator[None]:
    """A server at kube-proxy's default address, in the network namespace of the calling thread."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write({"/proxyMode": mode, "/metrics": metrics}.get(self.path, "").encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 10249), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def test_a_running_kube_proxy_is_reported_with_its_mode(doctor: Doctor) -> None:
    doctor.node.iptables((CAPTURED / "iptables-save.txt").read_text())
    with running(doctor, "kube-proxy") as process, answering("iptables"):
        checks = doctor.checks()
    assert checks[PROXY].state is State.REQUIRED
    assert checks[PROXY].detail == f"kube-proxy runs: process {process.pid}, mode iptables"
    assert LEFT_OVER not in checks


def test_a_kube_proxy_of_another_node_is_not_reported(doctor: Doctor) -> None:
    with running(doctor, "kube-proxy"), namespace("another") as another, another.entered():
        assert doctor.checks()[PROXY].state is State.PRESENT


def test_a_proxy_in_a_process_of_another_name_is_reported(doctor: Doctor) -> None:
    """k3s has kube-proxy in its own process."""
    with running(doctor, "k3s"), answering("ipvs"):
        check = doctor.checks()[PROXY]
    assert check.state is State.REQUIRED
    assert "mode ipvs" in check.detail
    assert "k3s: --disable-kube-proxy" in check.remedy


def test_an_agent_that_cannot_be_seen_is_recognized_by_its_metrics(doctor: Doctor) -> None:
    """In a pod without hostPID."""
    doctor.node.nft((CAPTURED / "nft.txt").read_text())
    with answering("nftables", 'ebpfproxy_info{mode="nftables"} 1\n'):
        checks = doctor.checks()
    assert checks[PROXY].state is State.PRESENT
    assert LEFT_OVER not in checks


def iptables_rules(node: Node) -> None:
    node.iptables((CAPTURED / "iptables-save.txt").read_text(), "legacy")


def nftables_rules(node: Node) -> None:
    node.nft((CAPTURED / "nft.txt").read_text())


def ipvs_device(node: Node) -> None:
    node.device("kube-ipvs0")


@pytest.mark.parametrize(
    ("build", "shown"),
    [
        (iptables_rules, "chain KUBE-SERVICES"),
        (nftables_rules, "table kube-proxy"),
        (ipvs_device, "device kube-ipvs0"),
    ],
    ids=["iptables", "nftables", "ipvs"],
)
def test_rules_of_a_stopped_kube_proxy_are_reported(doctor: Doctor, build: Build, shown: str) -> None:
    build(doctor.node)
    checks = doctor.checks()
    assert checks[PROXY].state is State.PRESENT
    assert checks[LEFT_OVER].state is State.OPTIONAL
    assert shown in checks[LEFT_OVER].detail


def test_programs_and_routes_of_a_stopped_agent_are_reported_also_beside_kube_proxy(doctor: Doctor) -> None:
    doctor.node.device("eth1")
    program = load_program(SCHED_CLS, 0)
    try:
        tc.attach(socket.if_nametoindex("eth1"), Side.INGRESS, program)
    finally:
        program.close()
    local_routes.change([parse_address("10.96.0.1")])
    expected = "of mode ebpf: filter at ingress of eth1; "
    expected += "of mode userspace: local routes to addresses of Services: 1, such as 10.96.0.1"
    assert doctor.checks()[LEFT_OVER].state is State.OPTIONAL
    assert doctor.checks()[LEFT_OVER].detail.endswith(f" left in force: {expected}")
    doctor.node.nft((CAPTURED / "nft.txt").read_text())
    assert doctor.checks()[LEFT_OVER].detail.endswith(f"{expected}; table kube-proxy")
    with running(doctor, "kube-proxy"):
        assert doctor.checks()[LEFT_OVER].detail.endswith(f" left in force: {expected}")


def test_the_proxy_of_kube_router_is_reported(doctor: Doctor) -> None:
    plugin_traces.kube_router_with_proxy(doctor.node)
    check = doctor.checks()[PROXY]
    assert check.state is State.REQUIRED
    assert "--run-service-proxy=false" in check.remedy


@pytest.mark.parametrize("hard", [False, True])
def test_a_port_of_the_agent_in_use_is_reported(doctor: Doctor, hard: bool) -> None:
    with answering("not a mode"):
        checks = doctor.checks(bind_address_hard_fail=hard)
    assert checks["free port 10249"].state is (State.REQUIRED if hard else State.OPTIONAL)
    assert "free port 10256" not in checks
    assert "free port 10249" not in doctor.checks()
