"""kubectl ebpfproxy, with a real kubectl and an API server that runs what the plugin executes in pods."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documented import PLUGIN, Command, in_help
from tests.support.kustomize import DEPLOY, KUBECTL, REPOSITORY, render
from tests.support.pods import PodServer, make_pod

EXAMPLES = [each for each in in_help() if each.text.startswith("kubectl")]
SCRIPT = """#!/bin/sh
printf '%s\\n' "$POD_NAME runs ebpfproxy $*"
echo "warning of $1" >&2
exit "${EXIT:-0}"
"""
"""The program `ebpfproxy` of a pod."""


class Cluster:
    """Nodes a, b and c; a and b have a pod. `home` has the kubeconfig."""

    def __init__(self, server: PodServer, home: Path) -> None:
        self.server = server
        self.home = home
        (home / ".kube").mkdir()
        server.write_kubeconfig(home / ".kube" / "config")
        server.pods = [make_pod("ebpfproxy-aaaaa", "a"), make_pod("ebpfproxy-bbbbb", "b")]
        for pod in ("ebpfproxy-aaaaa", "ebpfproxy-bbbbb"):
            self.install(pod, SCRIPT)

    def install(self, pod: str, script: str) -> None:
        folder = self.server.folders[pod] = self.home / pod
        folder.mkdir(exist_ok=True)
        program = folder / "ebpfproxy"
        program.write_text(script.replace("$POD_NAME", pod))
        program.chmod(0o755)

    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home), "PATH": f"{PLUGIN.parent}:{KUBECTL.parent}:/usr/bin:/bin"}

    def kubectl(
        self, *words: str, folder: Path | None = None, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run the plugin in `folder`, by default in the home."""
        return subprocess.run(
            [KUBECTL, "ebpfproxy", *words],
            cwd=folder or self.home,
            env=self.environment() | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with PodServer() as server:
        yield Cluster(server, tmp_path)


def test_the_command_runs_in_the_pod_on_the_node(cluster: Cluster) -> None:
    done = cluster.kubectl("dump", "a")
    assert (done.returncode, done.stdout) == (0, "ebpfproxy-aaaaa runs ebpfproxy dump\n")
    assert done.stderr == "warning of dump\n"
    assert [(pod, container) for pod, container, _ in cluster.server.executed] == [
        ("ebpfproxy-aaaaa", "ebpfproxy")
    ]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (("dump", "a", "--service=default/web", "-o", "json"), "dump --service=default/web -o json"),
        (("dump", "a", "--", "conntrack", "-o", "yaml"), "dump conntrack -o yaml"),
        (("-n", "kube-system", "dump", "--container=ebpfproxy", "a"), "dump"),
        (("top", "a", "--no-such-flag", "a value", "-n", "5"), "top --no-such-flag a value -n 5"),
        (("dump", "a", "--", "$(id)", "'\"`", "*"), "dump $(id) '\"` *"),
    ],
)
def test_arguments_are_passed_on(cluster: Cluster, words: tuple[str, ...], arguments: str) -> None:
    done = cluster.kubectl(*words)
    assert (done.returncode, done.stdout) == (0, f"ebpfproxy-aaaaa runs ebpfproxy {arguments}\n")


def test_commands_that_work_like_the_agent_get_its_flags_first(cluster: Cluster) -> None:
    (daemon_set,) = [each for each in render(DEPLOY / "base") if each["kind"] == "DaemonSet"]
    spec = daemon_set["spec"]["template"]["spec"]
    spec["containers"][0]["args"].append('--cluster-cidr=$5 "`\\')
    cluster.server.pods[0]["spec"] = spec | {"nodeName": "a"}
    cluster.server.environment = {"NODE_NAME": "a", "API_SERVER": "https://192.0.2.1:6443"}
    flags = "--config=/etc/ebpfproxy/config.conf --hostname-override=a --master=https://192.0.2.1:6443"
    for command in ("explain", "verify", "doctor", "dump"):
        done = cluster.kubectl(command, "a", "--", "10.96.0.1:443")
        assert done.stdout == (
            f'ebpfproxy-aaaaa runs ebpfproxy {command} {flags} --cluster-cidr=$5 "`\\ 10.96.0.1:443\n'
        )
    assert cluster.kubectl("version", "a").stdout == "ebpfproxy-aaaaa runs ebpfproxy version\n"


@pytest.mark.parametrize("flags", [["--bpffs-root=/sys/fs/bpf/two"], ["--bpffs-root", "/sys/fs/bpf/two"]])
def test_commands_without_a_configuration_get_only_the_root_of_the_maps(
    cluster: Cluster, flags: list[str]
) -> None:
    pod = make_pod("ebpfproxy-aaaaa", "a")
    pod["spec"]["containers"] = [
        {"name": "ebpfproxy", "args": ["run", "--config=/etc/config.conf", *flags, "-v=2"]}
    ]
    cluster.server.pods[0] = pod
    for command in ("monitor", "top"):
        done = cluster.kubectl(command, "a", "--", "--seconds=1")
        assert done.stdout == f"ebpfproxy-aaaaa runs ebpfproxy {command} {' '.join(flags)} --seconds=1\n"


def test_monitor_shows_the_lines_of_several_nodes_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Each pod ends only after both lines were shown."""
    for pod in ("ebpfproxy-aaaaa", "ebpfproxy-bbbbb"):
        cluster.install(
            pod, f"#!/bin/sh\necho an event\nwhile [ ! -e {tmp_path}/seen ]; do sleep 0.05; done\nexit 4\n"
        )
    with subprocess.Popen(
        [KUBECTL, "ebpfproxy", "monitor", "a", "b"],
        env=cluster.environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as plugin:
        assert plugin.stdout
        shown = {plugin.stdout.readline(), plugin.stdout.readline()}
        (tmp_path / "seen").touch()
        assert plugin.wait(60) == 4
    assert shown == {"a: an event\n", "b: an event\n"}


def test_an_interrupt_ends_monitor_on_all_nodes(cluster: Cluster) -> None:
    for pod in ("ebpfproxy-aaaaa", "ebpfproxy-bbbbb"):
        cluster.install(pod, "#!/bin/sh\necho an event\nexec sleep 600\n")
    with subprocess.Popen(
        [KUBECTL, "ebpfproxy", "monitor", "-A"],
        env=cluster.environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as plugin:
        assert plugin.stdout
        plugin.stdout.readline()
        plugin.stdout.readline()
        plugin.send_signal(signal.SIGINT)
        assert plugin.wait(60) == 130
        assert plugin.stdout.read() == "", "a process has the output still open"


def test_support_bundles_are_written_for_each_node(cluster: Cluster, tmp_path: Path) -> None:
    for pod in ("ebpfproxy-aaaaa", "ebpfproxy-bbbbb"):
        cluster.install(pod, "#!/bin/sh\nprintf '\\000\\377%s' \"$*\"\necho contents >&2\n")
    folder = tmp_path / "bundles"
    folder.mkdir()
    done = cluster.kubectl("support-bundle", "a", "b", "--anonymize", folder=folder)
    assert done.returncode == 0, done.stderr
    files = sorted(folder.iterdir())
    assert [each.name for each in files] == ["ebpfproxy-a.tar.gz", "ebpfproxy-b.tar.gz"]
    assert {each.read_bytes() for each in files} == {b"\0\xffsupport-bundle --anonymize -"}
    assert {each.stat().st_mode & 0o777 for each in files} == {0o600}
    assert done.stdout.splitlines()[0] == "a: wrote ebpfproxy-a.tar.gz: read it before you send it"
    assert "b: contents" in done.stderr.splitlines()
    again = cluster.kubectl("support-bundle", "a", folder=folder)
    assert again.returncode == 2
    assert "cannot write ebpfproxy-a.tar.gz: it exists" in again.stderr


def test_a_support_bundle_that_fails_leaves_no_file(cluster: Cluster, tmp_path: Path) -> None:
    cluster.install("ebpfproxy-aaaaa", "#!/bin/sh\necho part\nexit 4\n")
    folder = tmp_path / "bundles"
    folder.mkdir()
    assert cluster.kubectl("support-bundle", "a", folder=folder).returncode == 4
    assert not list(folder.iterdir())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: f"{each.text}")
def test_the_examples_of_the_help_run(cluster: Cluster, example: Command) -> None:
    for number, pod in enumerate(cluster.server.pods, 1):
        pod["spec"]["nodeName"] = f"worker-{number}"
    done = cluster.kubectl(*example.text.split()[2:])
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("code", [1, 4, 130])
def test_the_exit_code_of_the_command_is_passed_on(cluster: Cluster, code: int) -> None:
    cluster.server.environment = {"EXIT": str(code)}
    assert cluster.kubectl("verify", "a").returncode == code


def test_of_several_nodes_lines_have_the_name_and_the_highest_exit_code_counts(cluster: Cluster) -> None:
    cluster.install("ebpfproxy-bbbbb", "#!/bin/sh\necho one; echo two; echo failed >&2; exit 4\n")
    done = cluster.kubectl("verify", "b", "a")
    assert done.stdout == "b: one\nb: two\na: ebpfproxy-aaaaa runs ebpfproxy verify\n"
    assert {"b: failed", "a: warning of verify"} <= set(done.stderr.splitlines())
    assert done.returncode == 4


def test_all_nodes_are_those_with_a_pod(cluster: Cluster) -> None:
    done = cluster.kubectl("version", "--all-nodes", "-o", "json")
    assert done.stdout.splitlines() == [
        "a: ebpfproxy-aaaaa runs ebpfproxy version -o json",
        "b: ebpfproxy-bbbbb runs ebpfproxy version -o json",
    ]


def test_more_nodes_than_run_at_a_time_all_run_in_order(cluster: Cluster) -> None:
    names = [f"node-{number:02}" for number in range(23)]
    cluster.server.pods = [make_pod(f"pod-{name}", name) for name in names]
    for name in names:
        cluster.install(f"pod-{name}", "#!/bin/sh\necho done\n")
    done = cluster.kubectl("dump", "-A")
    assert done.stdout.splitlines() == [f"{name}: done" for name in names]
    assert done.returncode == 0


def test_a_node_without_a_pod_is_named_and_the_others_run(cluster: Cluster) -> None:
    done = cluster.kubectl("dump", "c")
    assert done.returncode == 3
    assert "cannot run dump on node c: it has no pod with the labels k8s-app=ebpfproxy" in done.stderr
    assert "\n  hint: " in done.stderr
    done = cluster.kubectl("dump", "c", "a")
    assert (done.returncode, done.stdout) == (3, "a: ebpfproxy-aaaaa runs ebpfproxy dump\n")


def test_a_pod_that_does_not_run_is_named_with_its_state(cluster: Cluster) -> None:
    waiting = {"name": "ebpfproxy", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    cluster.server.pods[0] = make_pod("ebpfproxy-aaaaa", "a", containerStatuses=[waiting])
    cluster.server.pods[1] = make_pod("ebpfproxy-bbbbb", "b", phase="Pending", conditions=[])
    assert "its pod ebpfproxy-aaaaa does not run: CrashLoopBackOff" in cluster.kubectl("dump", "a").stderr
    done = cluster.kubectl("dump", "b")
    assert "its pod ebpfproxy-bbbbb does not run: Pending" in done.stderr
    assert done.returncode == 3
    assert not cluster.server.executed


def test_a_pod_that_runs_but_is_not_ready_is_used_with_a_note(cluster: Cluster) -> None:
    unready = [{"type": "Ready", "status": "False"}]
    cluster.server.pods[0] = make_pod("ebpfproxy-aaaaa", "a", conditions=unready)
    done = cluster.kubectl("dump", "a")
    assert (done.returncode, done.stdout) == (0, "ebpfproxy-aaaaa runs ebpfproxy dump\n")
    assert "note: the pod ebpfproxy-aaaaa on node a is not ready" in done.stderr


def test_during_an_update_the_pod_that_stays_is_used(cluster: Cluster) -> None:
    ending = make_pod("ebpfproxy-old", "a")
    ending["metadata"]["deletionTimestamp"] = "2025-01-01T00:00:00Z"
    cluster.server.pods = [ending, *cluster.server.pods, ending]
    assert cluster.kubectl("dump", "a").stdout == "ebpfproxy-aaaaa runs ebpfproxy dump\n"


def test_other_labels_are_given_by_flags(cluster: Cluster) -> None:
    assert cluster.kubectl("dump", "-l", "k8s-app=other", "-A").returncode == 3
    cluster.server.pods[1]["metadata"]["labels"] = {"k8s-app": "other"}
    assert cluster.kubectl("dump", "-l", "k8s-app=other", "b").returncode == 0


def test_an_api_server_that_rejects_the_list_ends_with_3(cluster: Cluster) -> None:
    cluster.server.token = "another"
    done = cluster.kubectl("dump", "a")
    assert done.returncode == 3
    assert (
        "cannot list the pods with the labels k8s-app=ebpfproxy in the namespace kube-system" in done.stderr
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cleanup", "a"), "no such command: cleanup"),
        (("dump",), "name the nodes, or give --all-nodes"),
        (("dump", "--all-nodes", "a"), "give either nodes or --all-nodes"),
        (("dump", "a", "--namespace"), "the flag --namespace needs a value"),
        (("dump", "$(id)"), "'$(id)' is neither a command nor the name of a node"),
        ((), "Usage:"),
    ],
)
def test_an_invalid_command_line_ends_with_2(cluster: Cluster, words: tuple[str, ...], message: str) -> None:
    done = cluster.kubectl(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not cluster.server.executed


def test_no_color_is_passed_on(cluster: Cluster) -> None:
    cluster.install("ebpfproxy-aaaaa", '#!/bin/sh\necho "NO_COLOR=$NO_COLOR"\n')
    assert cluster.kubectl("dump", "a", NO_COLOR="1").stdout == "NO_COLOR=1\n"


def test_on_a_terminal_the_command_of_one_node_has_a_terminal(cluster: Cluster) -> None:
    cluster.install("ebpfproxy-aaaaa", "#!/bin/sh\ntest -t 0 && test -t 1 && echo a terminal\n")
    assert cluster.kubectl("top", "a").stdout == ""
    program = "import pty, sys\nsys.exit(pty.spawn(sys.argv[1:]) >> 8)\n"
    done = subprocess.run(
        [sys.executable, "-c", program, str(KUBECTL), "ebpfproxy", "top", "a"],
        env=cluster.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # kubectl may log that it cannot send the size of a terminal that has ended.
    shown = [line for line in done.stdout.splitlines() if "terminal size" not in line]
    assert (done.returncode, shown) == (0, ["a terminal"]), done.stderr


def test_the_real_command_runs_and_reports_its_error(cluster: Cluster, tmp_path: Path) -> None:
    script = f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} -m ebpfproxy "$@"\n'
    cluster.install("ebpfproxy-aaaaa", script)
    cluster.server.environment = {"HOME": os.environ["HOME"]}
    assert '"kernel"' in cluster.kubectl("version", "a", "-o", "json").stdout
    done = cluster.kubectl("dump", "a", "--no-such-flag")
    assert done.returncode == 2
    assert "ebpfproxy: unknown flag: --no-such-flag\n" in done.stderr


def test_the_defaults_are_those_of_the_daemon_set(cluster: Cluster) -> None:
    (daemon_set,) = [each for each in render(DEPLOY / "base") if each["kind"] == "DaemonSet"]
    script = PLUGIN.read_text()
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    assert (
        f"namespace={daemon_set['metadata']['namespace']} selector={selector} container={container['name']}\n"
        in script
    )


def test_shellcheck_accepts_the_plugin() -> None:
    program = str(Path(sys.executable).with_name("shellcheck"))
    done = subprocess.run([program, PLUGIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
