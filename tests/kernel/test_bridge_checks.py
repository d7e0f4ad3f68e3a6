"""What is found of bridges with pods, with and without br_netfilter."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends import bridge_checks
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netns import netns
from tests.support.namespace import namespace

pytestmark = pytest.mark.kernel

V4, V6 = "net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"


@pytest.fixture(autouse=True)
def _bridge() -> Iterator[None]:
    """The calling thread is in a network namespace with the bridge cni0, whose port leads to a pod."""
    with namespace("bridged-pod") as pod, netns.throw_away():
        for command in (
            "link add cni0 type bridge",
            "link add docker0 type bridge",
            f"link add veth0 type veth peer name eth0 netns {pod.name}",
            "link set veth0 master cni0",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield


def set_sysctl(name: str, value: str) -> None:
    try:
        sysctl.ensure(name, value)
    except Exception as failure:
        pytest.skip(f"no br_netfilter: {failure}")


@pytest.mark.parametrize("mode", ["nftables", "iptables", "ipvs"])
def test_a_bridge_with_pods_without_br_netfilter_is_found(mode: str) -> None:
    set_sysctl(V4, "0")
    set_sysctl(V6, "1")
    (finding,) = bridge_checks.probe(mode)
    assert finding.feature == "replies between pods of cni0"
    assert finding.remedy == "modprobe br_netfilter; sysctl -w net.bridge.bridge-nf-call-iptables=1"
    assert not finding.present
    assert not finding.needed
    set_sysctl(V4, "1")
    assert [each.present for each in bridge_checks.probe(mode)] == [True]


def test_a_kernel_without_br_netfilter_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysctl, "ROOT", tmp_path)
    (finding,) = bridge_checks.probe("nftables")
    assert finding.remedy.endswith(f"{V4.replace('/', '.')}=1 {V6.replace('/', '.')}=1")


def test_modes_without_nat_of_the_kernel_need_no_br_netfilter() -> None:
    assert bridge_checks.probe("ebpf") == bridge_checks.probe("userspace") == ()


def test_a_bridge_without_pods_is_no_finding() -> None:
    subprocess.run(["ip", "link", "set", "veth0", "nomaster"], check=True)
    assert bridge_checks.probe("nftables") == ()
