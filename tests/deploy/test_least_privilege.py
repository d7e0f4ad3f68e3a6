"""The pod of deploy/least-privilege serves with exactly the capabilities that it lists, and each is needed.

The container runtime is crun with the seccomp filter of CRI-O, and without the AppArmor profile.
deploy/README.md has a table of what fails without each capability.
"""

import contextlib
import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.agent.mode_cleanup import NOT_REMOVED
from ebpfproxy.backends.netfilter.sysctls import SETTING_FAILED
from ebpfproxy.lab.agent import AgentFailed
from ebpfproxy.linux import sysctl
from tests.deploy.installed import Installed
from tests.deploy.test_pod import answers, get, web
from tests.kernel.clients import UDP, connected, converse
from tests.kernel.cluster import Exposed, eventually
from tests.support import kustomize
from tests.support.kustomize import DEPLOY, Object, one

pytestmark = pytest.mark.kernel

CAPABILITIES = ["DAC_READ_SEARCH", "NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_PTRACE", "SYS_RESOURCE"]
_ARP = "net/ipv4/conf/eth0/arp_announce"
_ASK = """
import socket, sys
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.connect((sys.argv[1], 53))
while sys.stdin.readline():
    client.send(b"?")
    print(client.recv(100).decode(), flush=True)
"""


@pytest.fixture
def bare(installed: Installed) -> Installed:
    """A node without any object of previous agents, and with the kernel's value of a sysctl."""
    installed.cluster.ebpfproxy("cleanup", f"--bpffs-root={installed.paths['/sys/fs/bpf']}/ebpfproxy")
    installed.cluster.node.call(functools.partial(sysctl.ensure, _ARP, "0"))
    return installed


def prepare(installed: Installed, folder: Path, mode: str, without: str = "") -> None:
    """Use the component with a folder of deploy/modes ("": the base), but without one of the capabilities."""
    shutil.copytree(DEPLOY, folder / "deploy")
    overlay = folder / "deploy/overlay"
    overlay.mkdir()
    base = f"../modes/{mode}" if mode else "../base"
    (overlay / "kustomization.yaml").write_text(f"resources: [{base}]\ncomponents: [../least-privilege]\n")
    found = kustomize.render(overlay)
    context: Object = one(found, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert not context["privileged"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": CAPABILITIES}
    context["capabilities"]["add"] = [each for each in CAPABILITIES if each != without]
    installed.objects = found


@pytest.mark.parametrize("mode", ["", "nftables", "iptables"])
def test_the_pod_serves_with_exactly_the_listed_capabilities(
    bare: Installed, tmp_path: Path, mode: str
) -> None:
    prepare(bare, tmp_path, mode)
    exposed = web(bare)
    for _ in ("with a new state", "with the state of the previous pod"):
        agent = bare.start()
        assert answers(bare, exposed) == ["a", "a", "a"]
        assert get(bare, "/proxyMode", 10249) == (mode or "ebpf")
        assert SETTING_FAILED not in agent.log()
        assert agent.stop() == 0


def test_sysctls_are_written_although_proc_sys_is_read_only(bare: Installed, tmp_path: Path) -> None:
    prepare(bare, tmp_path, "")
    web(bare)
    agent = bare.start()
    read = functools.partial(sysctl.read, _ARP)
    eventually(lambda: str(bare.cluster.node.call(read)) == "2", "the uplink's arp_announce")
    agent.stop()


def test_doctor_finds_no_missing_permission(bare: Installed, tmp_path: Path) -> None:
    prepare(bare, tmp_path, "")
    web(bare)
    agent = bare.start()
    done = bare.execute("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("mode: ebpf ")
    subjects = [line.split(" ")[0] for line in lines]
    of_mode = lines[subjects.index("ebpf") : subjects.index("nftables")]
    assert of_mode
    assert not [line for line in of_mode if " missing " in line]
    agent.stop()


def reconnected(installed: Installed) -> float:
    """How many connected UDP sockets got another endpoint in place."""
    lines = get(installed, "/metrics", 10249).splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("ebpfproxy_sockets_reconnected_total ")]
    return float(value)


def not_reconnected(installed: Installed) -> float:
    """How many sockets were found that could not be reconnected."""
    lines = get(installed, "/metrics", 10249).splitlines()
    names = ("ebpfproxy_sockets_stale ", "ebpfproxy_sockets_translated ")
    return sum(float(line.split()[1]) for line in lines if line.startswith(names))


@contextlib.contextmanager
def client_of_another_user(installed: Installed, exposed: Exposed) -> Iterator[None]:
    """Within the block, a process of user 65534 in a pod has a UDP socket connected to the Service."""
    with installed.cluster.c.popen(
        [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "/usr/bin/python3",
            "-c",
            _ASK,
            exposed.v4,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    ) as process:
        try:
            assert ask(process) == "a"
            yield
        finally:
            process.kill()


def ask(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdin
    assert process.stdout
    process.stdin.write(b"?\n")
    process.stdin.flush()
    return process.stdout.readline().decode().strip()


@pytest.mark.parametrize(
    ("without", "count"),
    [("", 3), pytest.param("DAC_READ_SEARCH", 2, marks=pytest.mark.long), ("SYS_PTRACE", 0)],
    ids=lambda each: str(each),
)
def test_udp_sockets_are_reconnected(bare: Installed, tmp_path: Path, without: str, count: int) -> None:
    """Two sockets of root, on the node and in a pod, and one of another user. Without CAP_SYS_PTRACE none is
    reconnected, without CAP_DAC_READ_SEARCH only those of root."""
    prepare(bare, tmp_path, "", without)
    exposed = web(bare)
    agent = bare.start()
    with (
        client_of_another_user(bare, exposed),
        connected(bare.cluster.c, UDP, exposed.v4, 53) as own,
        connected(bare.cluster.node, UDP, exposed.v4, 53) as of_node,
    ):
        assert (converse(own), converse(of_node)) == ("a", "a")
        exposed.backends = (bare.cluster.b,)
        bare.put(exposed)
        eventually(
            lambda: reconnected(bare) == count and (count == 3 or not_reconnected(bare) > 0),
            "the search for sockets",
        )
    agent.stop()


def test_without_sys_admin_the_next_mode_is_selected(bare: Installed, tmp_path: Path) -> None:
    prepare(bare, tmp_path, "", "SYS_ADMIN")
    exposed = web(bare)
    agent = bare.start()
    assert get(bare, "/proxyMode", 10249) == "nftables"
    assert answers(bare, exposed) == ["a", "a", "a"]
    agent.stop()


def test_without_net_admin_mode_ebpf_cannot_remove_objects_of_other_modes(
    bare: Installed, tmp_path: Path
) -> None:
    chains = "add table ip kube-proxy; add chain ip kube-proxy services"
    bare.cluster.node.run(["nft", chains])
    prepare(bare, tmp_path, "", "NET_ADMIN")
    exposed = web(bare)
    agent = bare.start()
    agent.await_line(lambda line: NOT_REMOVED in line.text and "mode=nftables" in line.text)
    assert answers(bare, exposed) == ["a", "a", "a"]
    agent.stop()


@pytest.mark.parametrize(
    ("mode", "without", "more"),
    [
        ("nftables", "NET_ADMIN", ()),
        pytest.param("iptables", "NET_ADMIN", (), marks=pytest.mark.long),
        ("iptables", "NET_RAW", ("--iptables-backend=legacy",)),
    ],
)
def test_the_pod_does_not_start_without(
    bare: Installed, tmp_path: Path, mode: str, without: str, more: tuple[str, ...]
) -> None:
    prepare(bare, tmp_path, mode, without)
    one(bare.objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["args"] += more
    web(bare)
    with pytest.raises(AgentFailed, match="ended with status"):
        bare.start()
