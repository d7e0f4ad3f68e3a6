"""A node that does not allow BPF: the agent falls back to another mode and reports what is missing."""

import errno
import platform
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from ebpfproxy import cli
from ebpfproxy.agent.mode_cleanup import ALONE, NOT_REMOVED
from ebpfproxy.agent.mode_switch import UNAVAILABLE
from ebpfproxy.backends.ebpf import mode as ebpf_mode
from ebpfproxy.backends.nftables.coexistence import SKIP
from ebpfproxy.backends.userspace.backend import NO_REDIRECTS
from ebpfproxy.lab import Lab
from ebpfproxy.lab.agent import AgentFailed, LogLine
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.ipset import NETLINK_NETFILTER
from tests.kernel.clients import TCP, UDP, outcome
from tests.kernel.cluster import START_PATIENCE, Cluster
from tests.support import altered
from tests.support.confined import Rejections, rejecting, unmounting, without

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600)]

_SOCKET = {"x86_64": 41, "aarch64": 198}[platform.machine()]
_NO_BPF = Rejections(bpf.syscall_number(), errno.EPERM)
_NO_NFNETLINK = Rejections(_SOCKET, errno.EPROTONOSUPPORT, {0: socket.AF_NETLINK, 2: NETLINK_NETFILTER})


class Restriction(NamedTuple):
    """A command prefix that takes something from the agent; the expected reason and hint."""

    before: Sequence[str]
    missing: str
    remedy: str
    flags: tuple[str, ...] = ()


RESTRICTIONS = {
    "capabilities": Restriction(
        without("bpf", "perfmon", "sys_admin"),
        "bpf(2): without CAP_BPF and CAP_PERFMON it is not permitted (EPERM)",
        "run as root, or privileged",
    ),
    "seccomp": Restriction(
        rejecting(_NO_BPF),
        "bpf(2): a seccomp filter rejects it (EPERM)",
        "run the container privileged, or with seccomp unconfined",
    ),
    "cgroup v2": Restriction(
        unmounting("umount -a -t cgroup2"),
        "cgroup v2: cannot open the cgroup {cgroup}: No such file or directory (ENOENT)",
        "--cgroup-root",
    ),
    "bpffs": Restriction(
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

    def flags(self, restriction: Restriction) -> list[str]:
        return ["--iptables-min-sync-period=0s", "--oom-score-adj=0", *map(self.filled, restriction.flags)]

    def doctor(self, restriction: Restriction) -> str:
        """The output of `doctor` with the agent's flags and under the same restriction."""
        return self.cluster.ebpfproxy(
            "doctor", *self.flags(restriction), before=restriction.before, check=False
        ).stdout

    def reports_mode(self, mode: str) -> bool:
        get = self.cluster.http_get
        info = [line for line in get("metrics").splitlines() if line.startswith("ebpfproxy_info{")]
        return get("proxyMode") == mode and len(info) == 1 and f'mode="{mode}"' in info[0]

    def assert_serves(self) -> None:
        """Clients are answered at every frontend, also after the endpoints have changed."""
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
    """No agent runs after the test, and its state is removed."""
    try:
        yield _node
    finally:
        _node.cluster.end()
        _node.cluster.ebpfproxy("cleanup")


def is_unavailable(line: LogLine) -> bool:
    return line.text.split(" ", 2)[2].startswith(UNAVAILABLE)


def unavailable_modes(lines: Sequence[LogLine]) -> dict[str, LogLine]:
    """By mode, the one line that gives the reason."""
    reasons = [line for line in lines if is_unavailable(line)]
    found = {line.values["mode"]: line for line in reasons}
    assert len(found) == len(reasons)
    return found


def other_warnings(lines: Sequence[LogLine]) -> list[str]:
    """All other warnings and errors of the agent."""
    return [
        line.text
        for line in lines
        if line.text.split(" ")[1] in ("WARNING", "ERROR") and not is_unavailable(line)
    ]


@pytest.mark.parametrize(
    "restriction",
    [
        # test_ebpf_probes.py has the reasons.
        pytest.param(each, id=name, marks=pytest.mark.long if name in ("bpffs", "cgroup v2") else ())
        for name, each in RESTRICTIONS.items()
    ],
)
def test_without_bpf_the_agent_falls_back_to_nftables_and_logs_why(
    node: Node, restriction: Restriction
) -> None:
    agent = node.cluster.launch(*node.flags(restriction), before=restriction.before)
    agent.await_sync(timeout=START_PATIENCE)
    node.assert_serves()
    assert node.reports_mode("nftables")
    (reason,) = unavailable_modes(agent.lines).values()
    assert reason.values["mode"] == "ebpf"
    assert node.filled(restriction.missing) in reason.values["reason"]
    assert restriction.remedy in reason.values["hint"]
    assert other_warnings(agent.lines) == []
    assert "mode: nftables (the first that works on this node)" in node.doctor(restriction)


@pytest.mark.parametrize(
    "restriction", [RESTRICTIONS["capabilities"], RESTRICTIONS["seccomp"]], ids=["capabilities", "seccomp"]
)
@pytest.mark.same_for("restriction")
def test_without_bpf_and_nftables_the_agent_falls_back_to_iptables(
    node: Node, restriction: Restriction
) -> None:
    both = restriction._replace(before=(*restriction.before, *rejecting(_NO_NFNETLINK)))
    agent = node.cluster.launch(*node.flags(both), "--iptables-backend=legacy", before=both.before)
    agent.await_sync(timeout=START_PATIENCE)
    node.assert_serves()
    assert node.reports_mode("iptables")
    why = unavailable_modes(agent.lines)
    assert set(why) == {"ebpf", "nftables"}
    assert restriction.missing in why["ebpf"].values["reason"]
    assert "Protocol not supported (EPROTONOSUPPORT)" in why["nftables"].values["reason"]
    assert "modprobe nf_tables" in why["nftables"].values["hint"]
    assert "mode: iptables (the first that works on this node)" in node.doctor(both)


def test_with_an_old_kernel_version_the_agent_falls_back_to_iptables(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with kube-proxy. setarch makes the kernel report version 2.6."""
    monkeypatch.delenv(SKIP)
    before = (*RESTRICTIONS["seccomp"].before, "setarch", "--uname-2.6")
    restriction = RESTRICTIONS["seccomp"]._replace(before=before)
    agent = node.cluster.launch(*node.flags(restriction), "--iptables-backend=nft", before=before)
    agent.await_sync(timeout=START_PATIENCE)
    node.assert_serves()
    assert node.reports_mode("iptables")
    why = unavailable_modes(agent.lines)["nftables"].values
    assert "a node with Linux 2.6." in why["reason"]
    assert SKIP in why["hint"]


def test_programs_that_the_agent_lacks_permission_to_remove_are_reported(node: Node) -> None:
    """The agent had the capabilities at its previous start; the programs keep serving their last state."""
    node.cluster.launch(*node.flags(RESTRICTIONS["seccomp"])).await_sync(timeout=START_PATIENCE)
    assert node.reports_mode("ebpf")
    restriction = RESTRICTIONS["seccomp"]
    agent = node.cluster.launch(*node.flags(restriction), before=restriction.before)
    agent.await_sync(timeout=START_PATIENCE)
    warning = agent.await_line(lambda line: f" WARNING {NOT_REMOVED} " in line.text)
    assert warning.values["mode"] == "ebpf"
    assert warning.values["hint"]
    assert node.reports_mode("nftables")


# The kernel rejects a program although all probes succeed


@pytest.fixture(scope="module")
def rejected(tmp_path_factory: pytest.TempPathFactory) -> Restriction:
    """An agent with one program that the verifier rejects."""
    copy = altered.with_rejected_program(tmp_path_factory.mktemp("rejected"))
    return Restriction(("env", f"--chdir={copy}"), altered.REASON, "use another --proxy-mode")


def names_the_rejected_program(line: LogLine) -> bool:
    return (
        " ERROR " in line.text
        and line.values["mode"] == "ebpf"
        and line.values["program"] == altered.REJECTED
        and line.values["verifier"].splitlines() == [line.values["verifier"]]
        and altered.REASON in line.values["verifier"].split(" | ")[-1]
        and altered.REASON in line.values["reason"]
        and line.values["hint"].startswith("use another --proxy-mode")
    )


def test_with_a_rejected_program_the_agent_falls_back_to_nftables(node: Node, rejected: Restriction) -> None:
    agent = node.cluster.launch(*node.flags(rejected), before=rejected.before)
    agent.await_sync(timeout=START_PATIENCE)
    node.assert_serves()
    assert node.reports_mode("nftables")
    (line,) = unavailable_modes(agent.lines).values()
    assert names_the_rejected_program(line), line.text
    assert other_warnings(agent.lines) == []
    assert node.cluster.metric("ebpfproxy_mode_switches_failed_total") == 1
    assert not any("Traceback" in line.text for line in agent.lines)


def test_an_upgrade_with_a_rejected_program_replaces_ebpf_by_nftables(
    node: Node, rejected: Restriction
) -> None:
    """The previous version's programs forward until the nftables rules are in force."""
    node.cluster.launch(*node.flags(RESTRICTIONS["seccomp"])).await_sync(timeout=START_PATIENCE)
    assert node.reports_mode("ebpf")
    agent = node.cluster.launch(*node.flags(rejected), before=rejected.before)
    agent.await_sync(timeout=START_PATIENCE)
    assert node.reports_mode("nftables")
    agent.await_line(lambda line: ALONE in line.text)
    node.assert_serves()


def test_v_4_logs_the_verifier_output(node: Node, rejected: Restriction) -> None:
    agent = node.cluster.launch(*node.flags(rejected), "-v=4", before=rejected.before)
    agent.await_sync(timeout=START_PATIENCE)
    assert node.reports_mode("nftables")
    assert any(line.text.startswith("processed ") for line in agent.lines)


def test_with_proxy_mode_ebpf_a_rejected_program_ends_the_agent_with_a_one_line_error(
    node: Node, rejected: Restriction
) -> None:
    agent = node.cluster.launch(*node.flags(rejected), "--proxy-mode=ebpf", before=rejected.before)
    with pytest.raises(AgentFailed):
        agent.await_sync(timeout=START_PATIENCE)
    assert agent.process.wait() == 4
    line = agent.lines[-1]
    assert cli.ENDED in line.text
    assert line.values["error"].startswith(f"cannot load BPF program {altered.REJECTED}: Permission denied: ")
    assert altered.REASON in line.values["error"]
    assert line.values["hint"].startswith("use another --proxy-mode")


def test_without_bpf_nftables_and_iptables_the_agent_falls_back_to_userspace(
    node: Node, rejected: Restriction
) -> None:
    raw = Rejections(_SOCKET, errno.EPERM, {0: socket.AF_INET, 1: socket.SOCK_RAW})
    before = rejecting(_NO_NFNETLINK, raw)
    nothing = (*rejected.before, *without("net_raw"), *before)
    agent = node.cluster.launch(*node.flags(rejected), "--iptables-backend=nft", before=nothing)
    agent.await_sync(timeout=START_PATIENCE)
    node.assert_serves()
    assert node.reports_mode("userspace")
    why = unavailable_modes(agent.lines)
    assert next(iter(why)) == "ebpf"
    assert set(why) == {"ebpf", "nftables", "iptables", "ipvs"}
    assert f"cannot load BPF program {altered.REJECTED}: " in why["ebpf"].values["reason"]
    (warning,) = (line for line in agent.lines if NO_REDIRECTS in line.text)
    assert "nf_tables" in warning.values["reason"]
    (row,) = (
        line
        for line in node.doctor(Restriction(nothing, "", "")).splitlines()
        if "redirects to relays" in line
    )
    assert "missing (optional)" in row


def test_if_programs_cannot_be_attached_the_agent_falls_back_to_nftables(node: Node) -> None:
    """A security module may allow loading programs and deny attaching them, which only the first sync
    finds."""
    number = bpf.syscall_number()
    commands = (bpf.LINK_CREATE, bpf.PROG_ATTACH)
    before = rejecting(*(Rejections(number, errno.EPERM, {0: command}) for command in commands))
    restriction = Restriction(before, "cannot attach", "")
    agent = node.cluster.launch(*node.flags(restriction), before=before)
    agent.await_line(lambda line: is_unavailable(line), timeout=START_PATIENCE)
    agent.await_sync(since=len(agent.lines), timeout=START_PATIENCE)
    node.assert_serves()
    assert node.reports_mode("nftables")
    (line,) = unavailable_modes(agent.lines).values()
    assert (line.values["mode"], restriction.missing in line.values["reason"]) == ("ebpf", True)


def test_doctor_names_the_rejected_program(node: Node, rejected: Restriction) -> None:
    before = sorted(node.cluster.lab.bpffs.rglob("*"))
    output = node.doctor(rejected)
    before_row, found, row = " ".join(output.split()).partition(f"missing (required) {ebpf_mode.PROGRAMS} ")
    assert found
    row, _, after = row.partition(" see: ")
    assert row.startswith(f"cannot load BPF program {altered.REJECTED}: Permission denied: ")
    assert altered.REASON in row
    assert " remedy: use another --proxy-mode" in row, "a hint follows the reason"
    assert altered.REJECTED not in before_row + after
    assert "mode: nftables (the first that works on this node)" in output
    assert sorted(node.cluster.lab.bpffs.rglob("*")) == before
