"""A node that does not allow BPF: the agent serves by what there is, and says what is missing."""

import errno
import platform
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from ebpfproxy.agent.mode_cleanup import ALONE, NOT_REMOVED
from ebpfproxy.agent.mode_switch import UNAVAILABLE
from ebpfproxy.backends.ebpf import mode as ebpf_mode
from ebpfproxy.backends.nftables.old_nft import SKIP
from ebpfproxy.lab import Lab
from ebpfproxy.lab.agent import AgentFailed, LogLine
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.ipset.ipset import NETLINK_NETFILTER
from tests.kernel.clients import TCP, UDP, outcome
from tests.kernel.cluster import START_PATIENCE, Cluster
from tests.support import altered
from tests.support.confined import Rejections, rejecting, unmounting, without

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600)]

_SOCKET = {"x86_64": 41, "aarch64": 198}[platform.machine()]
_NO_BPF = Rejections(bpf.syscall_number(), errno.EPERM)
_NO_NFNETLINK = Rejections(_SOCKET, errno.EPROTONOSUPPORT, {0: socket.AF_NETLINK, 2: NETLINK_NETFILTER})


class Lack(NamedTuple):
    """How a process is started that lacks something; what is said to be missing, and to be done about it."""

    before: Sequence[str]
    missing: str
    remedy: str
    flags: tuple[str, ...] = ()


LACKS = {
    "capabilities": Lack(
        without("bpf", "perfmon", "sys_admin"),
        "bpf(2): without CAP_BPF and CAP_PERFMON it is not permitted (EPERM)",
        "run as root, or privileged",
    ),
    "seccomp": Lack(
        rejecting(_NO_BPF),
        "bpf(2): a seccomp filter rejects it (EPERM)",
        "run the container privileged, or with seccomp unconfined",
    ),
    "cgroup v2": Lack(
        unmounting("umount -a -t cgroup2"),
        "cgroup v2: cannot open the cgroup {cgroup}: No such file or directory (ENOENT)",
        "--cgroup-root",
    ),
    "bpffs": Lack(
        without("sys_admin"),
        "bpffs: none is mounted for {folder}/none, and mounting one is not permitted (EPERM)",
        "mount the host's /sys/fs/bpf into the container, or run it with CAP_SYS_ADMIN",
        ("--bpffs-root={folder}/none",),
    ),
}


class Node:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.web = cluster.service(node_port=True).to(cluster.a, cluster.b)

    def filled(self, text: str) -> str:
        lab = self.cluster.lab
        return text.format(folder=lab.folder, cgroup=lab.cgroup)

    def flags(self, lack: Lack) -> list[str]:
        return ["--iptables-min-sync-period=0s", "--oom-score-adj=0", *map(self.filled, lack.flags)]

    def doctor(self, lack: Lack) -> str:
        """What the agent's flags and rights amount to."""
        return self.cluster.ebpfproxy("doctor", *self.flags(lack), before=lack.before, check=False).stdout

    def tells_mode(self, mode: str) -> bool:
        told = self.cluster.told
        info = [line for line in told("metrics").splitlines() if line.startswith("ebpfproxy_info{")]
        return told("proxyMode") == mode and len(info) == 1 and f'mode="{mode}"' in info[0]

    def serves(self) -> None:
        """Whom it dials, a client is answered; also once endpoints have changed."""
        cluster, web = self.cluster, self.web
        for backends in ((cluster.a, cluster.b), (cluster.c,)):
            web.to(*backends)
            names = {pod.name for pod in backends}
            for client in (cluster.p, cluster.node):
                for protocol, port in ((TCP, 80), (UDP, 53)):
                    assert outcome(client, protocol, web.v4, port) in names, (client.name, protocol)
                    assert outcome(client, protocol, web.v6, port) in names, (client.name, protocol)
            assert outcome(cluster.lab.outside, TCP, cluster.node.v4, web.node_port) in names


@pytest.fixture(scope="module")
def _node() -> Iterator[Node]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(SKIP, "1")  # so that tests of nftables run on any kernel
        with Lab("test-fallback", 5) as lab, Cluster(lab, "auto") as cluster:
            yield Node(cluster)


@pytest.fixture
def node(_node: Node) -> Iterator[Node]:
    """Without an agent, and without what one has left."""
    try:
        yield _node
    finally:
        _node.cluster.end()
        _node.cluster.ebpfproxy("cleanup")


def is_unavailable(line: LogLine) -> bool:
    return line.text.split(" ", 2)[2].startswith(UNAVAILABLE)


def passed_over(lines: Sequence[LogLine]) -> dict[str, LogLine]:
    """By mode, the one line that says why it does not serve."""
    told = [line for line in lines if is_unavailable(line)]
    found = {line.values["mode"]: line for line in told}
    assert len(found) == len(told)
    return found


def troubles(lines: Sequence[LogLine]) -> list[str]:
    """What else the agent complains of."""
    return [
        line.text
        for line in lines
        if line.text.split(" ")[1] in ("WARNING", "ERROR") and not is_unavailable(line)
    ]


@pytest.mark.parametrize("lack", LACKS.values(), ids=LACKS)
def test_a_node_that_lacks_what_bpf_needs_is_served_by_nftables_and_told_why(node: Node, lack: Lack) -> None:
    agent = node.cluster.launch(*node.flags(lack), before=lack.before)
    agent.await_sync(timeout=START_PATIENCE)
    node.serves()
    assert node.tells_mode("nftables")
    (reason,) = passed_over(agent.lines).values()
    assert reason.values["mode"] == "ebpf"
    assert node.filled(lack.missing) in reason.values["reason"]
    assert lack.remedy in reason.values["hint"]
    assert troubles(agent.lines) == []
    assert "mode: nftables (the first that has all it needs)" in node.doctor(lack)


@pytest.mark.parametrize("lack", [LACKS["capabilities"], LACKS["seccomp"]], ids=["capabilities", "seccomp"])
def test_a_node_without_nftables_too_is_served_by_iptables(node: Node, lack: Lack) -> None:
    both = lack._replace(before=(*lack.before, *rejecting(_NO_NFNETLINK)))
    agent = node.cluster.launch(*node.flags(both), "--iptables-backend=legacy", before=both.before)
    agent.await_sync(timeout=START_PATIENCE)
    node.serves()
    assert node.tells_mode("iptables")
    why = passed_over(agent.lines)
    assert set(why) == {"ebpf", "nftables"}
    assert lack.missing in why["ebpf"].values["reason"]
    assert "Protocol not supported (EPROTONOSUPPORT)" in why["nftables"].values["reason"]
    assert "modprobe nf_tables" in why["nftables"].values["hint"]
    assert "mode: iptables (the first that has all it needs)" in node.doctor(both)


def test_a_kernel_whose_distribution_may_have_an_old_nft_is_served_by_iptables(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by kube-proxy; setarch has the kernel say that it is a 2.6."""
    monkeypatch.delenv(SKIP)
    before = (*LACKS["seccomp"].before, "setarch", "--uname-2.6")
    lack = LACKS["seccomp"]._replace(before=before)
    agent = node.cluster.launch(*node.flags(lack), "--iptables-backend=nft", before=before)
    agent.await_sync(timeout=START_PATIENCE)
    node.serves()
    assert node.tells_mode("iptables")
    why = passed_over(agent.lines)["nftables"].values
    assert "a node with Linux 2.6." in why["reason"]
    assert SKIP in why["hint"]


def test_programs_that_an_agent_may_not_remove_any_more_are_told_of(node: Node) -> None:
    """It had the rights when it was started before; the programs go on as they were told then."""
    node.cluster.launch(*node.flags(LACKS["seccomp"])).await_sync(timeout=START_PATIENCE)
    assert node.tells_mode("ebpf")
    lack = LACKS["seccomp"]
    agent = node.cluster.launch(*node.flags(lack), before=lack.before)
    agent.await_sync(timeout=START_PATIENCE)
    told = agent.await_line(lambda line: f" WARNING {NOT_REMOVED} " in line.text)
    assert told.values["mode"] == "ebpf"
    assert told.values["hint"]
    assert node.tells_mode("nftables")


# Programs that this kernel rejects, although all that was probed is there


@pytest.fixture(scope="module")
def rejected(tmp_path_factory: pytest.TempPathFactory) -> Lack:
    """An agent of which the verifier rejects one program."""
    copy = altered.with_rejected_program(tmp_path_factory.mktemp("rejected"))
    return Lack(("env", f"--chdir={copy}"), altered.REASON, "use another --proxy-mode")


def is_told_of_program(line: LogLine) -> bool:
    return (
        " ERROR " in line.text
        and line.values["mode"] == "ebpf"
        and line.values["program"] == altered.REJECTED
        and line.values["verifier"].splitlines() == [line.values["verifier"]]
        and altered.REASON in line.values["verifier"].split(" | ")[-1]
        and altered.REASON in line.values["reason"]
        and line.values["hint"].startswith("use another --proxy-mode")
    )


def test_a_node_whose_kernel_rejects_a_program_is_served_by_nftables(node: Node, rejected: Lack) -> None:
    agent = node.cluster.launch(*node.flags(rejected), before=rejected.before)
    agent.await_sync(timeout=START_PATIENCE)
    node.serves()
    assert node.tells_mode("nftables")
    (line,) = passed_over(agent.lines).values()
    assert is_told_of_program(line), line.text
    assert troubles(agent.lines) == []
    assert node.cluster.metric("ebpfproxy_mode_moves_failed_total") == 1
    assert not any("Traceback" in line.text for line in agent.lines)


def test_an_upgrade_whose_programs_are_rejected_replaces_those_that_run(node: Node, rejected: Lack) -> None:
    """Those of the version before forward until the rules of nftables are in force."""
    node.cluster.launch(*node.flags(LACKS["seccomp"])).await_sync(timeout=START_PATIENCE)
    assert node.tells_mode("ebpf")
    agent = node.cluster.launch(*node.flags(rejected), before=rejected.before)
    agent.await_sync(timeout=START_PATIENCE)
    assert node.tells_mode("nftables")
    agent.await_line(lambda line: ALONE in line.text)
    node.serves()


def test_with_v_4_the_log_of_the_verifier_is_shown(node: Node, rejected: Lack) -> None:
    agent = node.cluster.launch(*node.flags(rejected), "-v=4", before=rejected.before)
    agent.await_sync(timeout=START_PATIENCE)
    assert node.tells_mode("nftables")
    assert any(line.text.startswith("processed ") for line in agent.lines)


def test_an_agent_that_is_to_serve_by_ebpf_ends_with_one_line_that_names_the_program(
    node: Node, rejected: Lack
) -> None:
    agent = node.cluster.launch(*node.flags(rejected), "--proxy-mode=ebpf", before=rejected.before)
    with pytest.raises(AgentFailed):
        agent.await_sync(timeout=START_PATIENCE)
    assert agent.process.wait() == 4
    said, hint = (line.text for line in agent.lines[-2:])
    assert said.startswith(f"ebpfproxy: cannot load BPF program {altered.REJECTED}: Permission denied: ")
    assert altered.REASON in said
    assert hint.startswith("  hint: use another --proxy-mode")


def test_where_no_other_mode_works_the_rejected_program_is_the_first_reason(
    node: Node, rejected: Lack
) -> None:
    raw = Rejections(_SOCKET, errno.EPERM, {0: socket.AF_INET, 1: socket.SOCK_RAW})
    before = rejecting(_NO_NFNETLINK, raw)
    nothing = (*rejected.before, *without("net_raw"), *before)
    agent = node.cluster.launch(*node.flags(rejected), "--iptables-backend=nft", before=nothing)
    with pytest.raises(AgentFailed):
        agent.await_sync(timeout=START_PATIENCE)
    assert agent.process.wait() == 4
    (said,) = (line.text for line in agent.lines if line.text.startswith("ebpfproxy: no mode works"))
    assert f"ebpf: cannot load BPF program {altered.REJECTED}: " in said
    assert said.index("ebpf: ") < said.index("nftables: ") < said.index("iptables: ")


def test_a_node_that_takes_no_attachments_is_served_by_nftables(node: Node) -> None:
    """A security module may let programs be loaded, and none be attached: that shows in the first sync."""
    number = bpf.syscall_number()
    commands = (bpf.LINK_CREATE, bpf.PROG_ATTACH)
    before = rejecting(*(Rejections(number, errno.EPERM, {0: command}) for command in commands))
    lack = Lack(before, "cannot attach", "")
    agent = node.cluster.launch(*node.flags(lack), before=before)
    agent.await_line(lambda line: is_unavailable(line), timeout=START_PATIENCE)
    agent.await_sync(since=len(agent.lines), timeout=START_PATIENCE)
    node.serves()
    assert node.tells_mode("nftables")
    (line,) = passed_over(agent.lines).values()
    assert (line.values["mode"], lack.missing in line.values["reason"]) == ("ebpf", True)


def test_doctor_says_which_program_is_rejected(node: Node, rejected: Lack) -> None:
    before = sorted(node.cluster.lab.bpffs.rglob("*"))
    said = node.doctor(rejected)
    (line,) = (line for line in said.splitlines() if altered.REJECTED in line)
    assert f"{ebpf_mode.PROGRAMS} " in line
    assert " NO " in line
    assert f"cannot load BPF program {altered.REJECTED}: Permission denied: " in line
    assert altered.REASON in line
    assert "; use another --proxy-mode" in line, "and what to do"
    assert "mode: nftables (the first that has all it needs)" in said
    assert sorted(node.cluster.lab.bpffs.rglob("*")) == before
