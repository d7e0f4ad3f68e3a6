"""Runs commands of the documents and of the help on a node of a lab, and compares the documented results.

The node has the Services of `objects`, an agent in the mode of the command, and open connections.
tests/unit/test_documented_commands.py checks the other commands.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.lab import Lab, manifests, testbed
from ebpfproxy.linux.netns import netns
from tests.kernel.clients import TCP, connected, converse
from tests.kernel.cluster import START_PATIENCE, Cluster
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.support.documented import ROOT, Command, commands, shell_blocks
from tests.support.documented_checks import mode_of
from tests.support.namespace import namespace

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

MODES = {
    "ebpf": ("ebpf", ()),
    "nftables": ("nftables", ()),
    "iptables": ("iptables", ("--iptables-backend=nft",)),
    "ipvs": ("ipvs", ("--iptables-backend=nft",)),
    "userspace": ("userspace", ()),
}
"""As tests/support/documented_checks.py names them: the mode, and flags of the agent."""


def is_cleanup(command: Command) -> bool:
    """Whether it removes what other commands show."""
    return command.text.startswith("ebpfproxy cleanup") and "--dry-run" not in command.text


def different(mode: str) -> list[Command]:
    """The commands for that mode: one for each text and result. `cleanup` is the last one."""
    wanted = [each for each in commands() if mode_of(each) == mode]
    compared = {each.text for each in wanted if each.shown}
    found = {(each.text, each.shown): each for each in wanted if each.shown or each.text not in compared}
    return sorted(found.values(), key=is_cleanup)


def cases(mode: str) -> Iterator[object]:
    """`make test` runs each command of ebpfproxy once if no result is documented: others only have other
    flags, which tests/unit/test_documented_commands.py checks."""
    tried = {tuple(each.text.split()[:2]) for each in different(mode) if each.shown}
    for command in different(mode):
        words = tuple(command.text.split()[:2])
        repeated = not command.shown and words[0] == "ebpfproxy" and words in tried
        tried.add(words)
        yield pytest.param(
            *(mode, command),
            id=f"{mode} {command.place} {command.text}"[:100],
            marks=pytest.mark.long if repeated else (),
        )


CASES = [case for mode in MODES for case in cases(mode)]
PROGRAM = f"PYTHONPATH={ROOT} {sys.executable} -m ebpfproxy"
"""This checkout's, whatever the current folder is."""
PLACEHOLDERS = {"NAMESPACE/NAME": "default/web", "FRONTEND": "10.96.0.10", "DEVICE": "eth0", "…": "*"}
"""The values for a document's placeholders. CLIENT is the external client."""
MAY_FAIL = re.compile(r"\bgrep |ebpfproxy doctor")
"""grep ends with status 1 if it finds nothing, doctor if the machine lacks a feature."""
BEFORE = {
    "for t in iptables": "for t in iptables ip6tables; do $t -t mangle -N KUBE-IPVS-OUT-FILTER; "
    "$t -t nat -N KUBE-IPVS-POSTROUTING; done"
}
"""Commands that prepare the node for a command with this beginning."""
_AS_ON_A_NODE = """
mount -t tmpfs -o mode=755 tmpfs /sys/fs/bpf
mkdir /sys/fs/bpf/ebpfproxy
mount --bind "$1" /sys/fs/bpf/ebpfproxy
cd "$2"
PATH="$2:$PATH" exec bash -c "$3"
"""


class Node:
    """A node with Services. Commands run on it as documents show them, with the paths of a real node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.mode = ""
        self._connections = contextlib.ExitStack()
        cluster.write("documented", *objects(cluster))
        roots = f"--bpffs-root=/sys/fs/bpf/ebpfproxy --cgroup-root={cluster.lab.cgroup}"
        install(
            folder,
            f'case $1 in cleanup|doctor|run) set -- "$@" {roots};; esac; {PROGRAM} "$@"',
        )

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def run_mode(self, mode: str) -> None:
        """Start the agent in this mode and open connections, unless it already runs in it."""
        if mode == self.mode:
            return
        self.close()
        if self.mode:
            self.cluster.end()
            self.cluster.ebpfproxy("cleanup", check=False)
        self.cluster.mode, flags = MODES[mode]
        node_ports = f"--nodeport-addresses={self.cluster.node.v4}/32,127.0.0.0/8"
        self.cluster.start(
            node_ports, "--detect-local-mode=ClusterCIDR", "--cluster-cidr=10.244.0.0/16", *flags
        )
        self.mode = mode
        for place, address, port in (
            (self.cluster.p, "10.96.0.10", 80),
            (self.cluster.p, "10.96.0.11", 80),
            (self.cluster.lab.outside, self.cluster.node.v4, 30080),
        ):
            client = self._connections.enter_context(connected(place, TCP, address, port))
            assert converse(client) in ("a", "b")

    def run(self, text: str) -> "subprocess.CompletedProcess[str]":
        for name, value in (*PLACEHOLDERS.items(), ("CLIENT", self.cluster.lab.outside.v4)):
            text = text.replace(name, value)
        text = re.sub(r">/(?:etc|usr)/\S+", ">/dev/null", text)  # the machine's
        unshare = ["unshare", "--mount", "bash", "-ec", _AS_ON_A_NODE, "bash"]
        return self.cluster.node.run(
            [*unshare, str(self.cluster.lab.bpffs), str(self.folder), text],
            check=False,
            timeout=START_PATIENCE,
        )


def objects(cluster: Cluster) -> list[manifests.Object]:
    """default/web, as in the examples, and one Service of each kind that has its own kernel objects."""
    http = manifests.port(80, name="http", node_port=30080)
    named = [manifests.port(80, name="http")]
    target = [manifests.port(8080, name="http")]
    pods = [manifests.endpoint(pod.v4, node=cluster.lab.node_name) for pod in (cluster.a, cluster.b)]
    restricted = manifests.service(
        "ranges",
        ["10.96.0.13"],
        [manifests.port(80, name="http", node_port=30083)],
        type="LoadBalancer",
        loadBalancerSourceRanges=["192.0.2.0/24"],
        externalTrafficPolicy="Local",
        healthCheckNodePort=30183,
    )
    restricted["status"] = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}
    local = manifests.service("local", ["10.96.0.14"], named, internalTrafficPolicy="Local")
    affinity: dict[str, Any] = {
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}},
    }
    elsewhere = [manifests.endpoint("10.99.0.1", node="elsewhere")]
    return [
        manifests.service("web", ["10.96.0.10"], [http]),
        manifests.endpoint_slice("web-1", "web", pods, target),
        manifests.service("sticky", ["10.96.0.11"], named, **affinity),
        manifests.endpoint_slice("sticky-1", "sticky", pods, target),
        manifests.service("empty", ["10.96.0.12"], named),
        restricted,
        manifests.endpoint_slice("ranges-1", "ranges", pods, target),
        local,
        manifests.endpoint_slice("local-1", "local", elsewhere, target),
    ]


def install(folder: Path, script: str) -> None:
    """Write the programs `ebpfproxy`, `.venv/bin/ebpfproxy` and `sudo` into a folder."""
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    for path, text in (
        (folder / "ebpfproxy", script),
        (folder / ".venv/bin/ebpfproxy", script),
        (folder / "sudo", 'exec "$@"'),
    ):
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)


def program_of(text: str) -> str:
    return text.split()[0]


def pattern_of(shown: str) -> re.Pattern[str]:
    """Matches what a document shows: numbers, names in capitals and `…` match other ones.

    >>> bool(pattern_of("ADDRESS . PORT : goto service-…").search("10.0.0.1 . 80 : goto service-ABC-x"))
    True
    >>> bool(pattern_of("connect4 10.0.0.1:80").search("connect6 10.0.0.1:80"))
    False
    """
    words = []
    for word in shown.split():
        text = re.sub(r"KUBE-SEP-[A-Z0-9]+", "KUBE-SEP-…", word)
        text = re.sub(r"\b(?:ADDRESS|PROTOCOL|PORT|IFINDEX|NAME|LAYOUT|ROOM)(?=[,:_-]|\b)", "…", text)
        text = re.escape(text).replace("…", r"\S+").replace(r"\*", r"\S*")
        words.append(re.sub(r"(?<!\w)\d+(?:\\\.\d+)*(?!\w)", r"[\\d.]+", text))
    return re.compile(r"\s+".join(words))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("checkout")
    with (
        Lab("test-documented", 74) as lab,
        Cluster(lab) as cluster,
        contextlib.closing(Node(cluster, folder)) as made,
    ):
        yield made


@pytest.mark.parametrize(("mode", "command"), CASES)
def test_a_documented_command_prints_the_documented_result(node: Node, mode: str, command: Command) -> None:
    skip_without_ipvs(MODES[mode][0])
    if not shutil.which(program_of(command.text)) and program_of(command.text) not in ("ebpfproxy", "for"):
        pytest.skip(f"no program {program_of(command.text)}")
    node.run_mode(mode)
    for beginning, first in BEFORE.items():
        if command.text.startswith(beginning):
            assert node.run(first).returncode == 0
    if is_cleanup(command):
        node.cluster.end()
        node.mode = ""
    done = node.run(command.text)
    assert done.returncode == 0 or (MAY_FAIL.search(command.text) and not done.stderr), done.stderr
    for shown in command.shown:
        assert pattern_of(shown).search(done.stdout), f"{command.place}: {shown!r} is not in:\n{done.stdout}"


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the name of a cgroup, which is removed afterwards."""
    install(tmp_path, f'exec env {PROGRAM} "$@"')
    name = f"ebpfproxy-test-{os.getpid()}-try"
    yield tmp_path, name
    testbed.remove_cgroup(testbed.cgroup_mount() / name)


def run_as_group(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command, then kill the background processes that it left."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, stdout=pipe, stderr=pipe, text=True, process_group=0
    ) as process:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_all_commands_of_the_quickstart_work_in_order(checkout: tuple[Path, str]) -> None:
    """It runs in its own network and mount namespaces, with its own bpffs."""
    folder, cgroup = checkout
    blocks = shell_blocks("docs/quickstart.md")
    script = "mount -t bpf bpf /sys/fs/bpf\n"
    for number, (text, _) in enumerate(blocks):
        script += (
            f"{text.replace('/tmp/', f'{folder}/').replace('try-ebpfproxy', cgroup)}\necho END {number}\n"
        )
    with namespace("quickstart") as node:
        node.ip("link set lo up")
        enter = ["nsenter", f"--net={netns.path(node.name)}", "unshare", "--mount"]
        done = run_as_group([*enter, "bash", "-c", script], folder)
    log = (folder / "ebpfproxy.log").read_text()
    assert done.returncode == 0, done.stderr + log
    written = re.split(r"END \d+\n", done.stdout)
    for (text, shown), output in zip(blocks, written, strict=False):
        if set(shown) <= {"one", "two"}:
            assert len(output.splitlines()) == len(shown), text
            assert set(output.splitlines()) <= set(shown), text
        for line in shown:
            assert set(shown) == {"one", "two"} or pattern_of(line).search(output), (
                f"{text}: {line}\n{output}"
            )
    assert not done.stderr, done.stderr
