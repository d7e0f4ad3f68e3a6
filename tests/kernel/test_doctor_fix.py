"""`ebpfproxy doctor` as a command: its output, and the actions of --fix."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.diagnose.doctor.links import Page
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netns import netns
from tests.kernel import plugin_traces
from tests.kernel.ipvs_here import lacks_ipvs
from tests.support.bpf_place import BpfPlace, bpf_place
from tests.support.documented import ROOT
from tests.support.kube_proxy import CAPTURED
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

ESTABLISHED = "net/netfilter/nf_conntrack_tcp_timeout_established"
KERNELS_DEFAULT = str(5 * 24 * 3600)
COUNTERS = re.compile(r"packets \d+ bytes \d+|\[\d+:\d+\]|^#.*", re.MULTILINE)
SET_ESTABLISHED = f"sysctl -w {ESTABLISHED.replace('/', '.')}=86400"


class Node:
    """A network namespace in which the calling thread is. Commands run in a mount namespace of their own."""

    def __init__(self, place: BpfPlace, space: Namespace) -> None:
        self.place = place
        self.space = space

    @property
    def _command(self) -> str:
        roots = f"--cgroup-root={self.place.cgroup} --hostname-override=here --cni-config-dir=/missing"
        return f"{sys.executable} -m ebpfproxy doctor {roots}"

    def shell(self, script: str, env: Mapping[str, str] = {}) -> "subprocess.CompletedProcess[str]":
        """`doctor` in the script is the command with this node's roots. A mount ends with the script."""
        function = f'doctor() {{ {self._command} "$@"; }}\n'
        return subprocess.run(
            [
                *("nsenter", f"--net={netns.path(self.space.name)}", "unshare", "--mount"),
                *("bash", "-uc", function + script),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def doctor(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.shell("doctor " + " ".join(arguments))

    def doctor_without_bpf(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """For other modes: otherwise the kernel verifies all programs, which takes a second."""
        lacking = "setpriv --bounding-set=-bpf,-sys_admin "
        return self.shell(f"exec {lacking}{self._command} " + " ".join(arguments))


@pytest.fixture(scope="module")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture
def node(place: BpfPlace) -> Iterator[Node]:
    with namespace("fix") as space, space.entered():
        netns.set_loopback_up()
        yield Node(place, space)


def actions(output: str, beginning: str) -> list[str]:
    return [line.removeprefix(beginning) for line in output.splitlines() if line.startswith(beginning)]


def skip_with_ipvs() -> None:
    if not lacks_ipvs():
        pytest.skip("this kernel has IPVS")


def test_json_has_the_rows_of_the_table(node: Node) -> None:
    table, printed = node.doctor(), node.doctor("-o", "json")
    assert printed.returncode == table.returncode
    found: dict[str, Any] = json.loads(printed.stdout)
    header, *lines = table.stdout.splitlines()
    assert header.split() == ["SUBJECT", "STATE", "FEATURE"]
    shown = " ".join(table.stdout.split())
    for check in found["checks"]:
        parts = [check["state"], check["feature"], check["detail"]]
        parts += ["remedy:", check["remedy"], "see:", check["link"]] if check["remedy"] else []
        row = " ".join(" ".join(parts).split())
        assert row in shown
        shown = shown[shown.index(row) + len(row) :]
        assert check["state"] == "present" or check["remedy"]
    assert lines[-1].startswith(f"mode: {found['mode']} ")
    assert max(map(len, lines)) <= 80, "the width of a terminal"
    assert found["complete"] == (table.returncode == 0)
    assert found["actions"] == []


def test_another_proxy_changes_the_exit_code_of_a_complete_node(node: Node) -> None:
    before = json.loads(node.doctor("--proxy-mode=nftables", "-o", "json").stdout)
    assert before["complete"]
    with plugin_traces.node(Path("/missing"), node.place.cgroup) as traces:
        traces.socket_program("cil_sock4_connect")
        done = node.doctor("--proxy-mode=nftables")
    assert done.returncode == 1
    row = " ".join(done.stdout.split()).partition("missing (required) no other service proxy ")[2]
    assert row.startswith("Cilium replaces kube-proxy: cil_sock4_conne at the root of cgroup v2 remedy: ")
    assert Page.OTHER_PROXY.path in row


def test_a_dry_run_changes_nothing_and_the_fix_is_idempotent(node: Node) -> None:
    assert sysctl.read(ESTABLISHED) == KERNELS_DEFAULT
    dry = node.doctor_without_bpf("--proxy-mode=nftables", "--fix", "--dry-run")
    assert SET_ESTABLISHED in actions(dry.stdout, "would run: ")
    assert sysctl.read(ESTABLISHED) == KERNELS_DEFAULT
    done = node.doctor_without_bpf("--proxy-mode=nftables", "--fix")
    assert actions(done.stdout, "fix: ") == actions(dry.stdout, "would run: ")
    assert "failed: " not in done.stdout
    assert sysctl.read(ESTABLISHED) == "86400"
    again = node.doctor_without_bpf("--proxy-mode=nftables", "--fix")
    assert actions(again.stdout, "fix: ") == ["nothing to do"]


def test_the_fix_sets_what_the_configuration_says(node: Node) -> None:
    node.doctor_without_bpf("--proxy-mode=nftables", "--conntrack-tcp-timeout-established=0", "--fix")
    assert sysctl.read(ESTABLISHED) == KERNELS_DEFAULT
    node.doctor_without_bpf("--proxy-mode=nftables", "--conntrack-tcp-be-liberal", "--fix")
    assert sysctl.read("net/netfilter/nf_conntrack_tcp_be_liberal") == "1"


def test_the_fix_keeps_objects_of_others(node: Node) -> None:
    with plugin_traces.node(Path("/missing"), node.place.cgroup) as traces:
        traces.iptables((CAPTURED / "iptables-save.txt").read_text())
        traces.device("kube-ipvs0", "cilium_host")
    before = state()
    done = node.doctor_without_bpf("--proxy-mode=iptables", "--iptables-backend=nft", "--fix")
    assert SET_ESTABLISHED in actions(done.stdout, "fix: ")
    assert state() == before
    assert sysctl.read("net/ipv4/conf/all/route_localnet") == "0", "rules must protect the node first"


def state() -> tuple[str, ...]:
    """The rules and devices of the namespace, without counters."""
    commands = ["iptables-nft-save"], ["nft", "list", "ruleset"], ["ip", "-o", "link"]
    shown = (subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in commands)
    return tuple(COUNTERS.sub("", each) for each in shown)


def test_the_fix_mounts_a_bpffs_once(node: Node, tmp_path: Path) -> None:
    root = tmp_path / "bpf"
    fix = f"doctor --proxy-mode=ebpf --bpffs-root={root} --fix"
    script = f"{fix} --dry-run; test ! -e {root} || echo exists; {fix}; stat -f -c %T {root}; {fix}"
    lines = node.shell(script).stdout.splitlines()
    shown = [each for each in lines if each.startswith(("would run:", "fix:", "bpf_fs", "exists"))]
    mount = f"mount -t bpf bpf {root}"
    assert shown == [f"would run: {mount}", f"fix: {mount}", "bpf_fs", "fix: nothing to do"]


def test_missing_modules_are_loaded_by_modprobe(node: Node, tmp_path: Path) -> None:
    """With a modprobe that only writes down its arguments: the kernel has no such modules."""
    skip_with_ipvs()
    tool, loaded = tmp_path / "modprobe", tmp_path / "loaded"
    tool.write_text(f'#!/bin/sh\necho "$@" >>{loaded}\n')
    tool.chmod(0o755)
    done = node.shell("doctor --proxy-mode=ipvs --fix", {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    names = [each.removeprefix("modprobe ") for each in actions(done.stdout, "fix: ") if "modprobe" in each]
    assert {"ip_vs", "ip_vs_rr"} <= set(names)
    assert loaded.read_text().splitlines() == [f"-- {name}" for name in names]


def test_a_module_that_cannot_be_loaded_is_reported_and_does_not_end_the_fix(node: Node) -> None:
    skip_with_ipvs()
    done = node.doctor("--proxy-mode=ipvs", "--fix", "-o", "json")
    found = {each["action"]: each["failure"] for each in json.loads(done.stdout)["actions"]}
    assert found["modprobe ip_vs"].startswith("cannot load the module ip_vs: ")
    assert found[SET_ESTABLISHED] == ""
    assert {each["state"] for each in json.loads(done.stdout)["actions"]} == {"done", "failed"}
    assert "fix: modprobe ip_vs" in done.stderr.splitlines()
    assert done.returncode == 1


def test_a_dry_run_without_a_fix_is_rejected(node: Node) -> None:
    done = node.doctor("--dry-run")
    assert done.returncode == 2
    assert "--dry-run requires --fix" in done.stderr
