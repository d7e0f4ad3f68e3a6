"""What is read from files and from proc, without privileges."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from ebpfproxy.diagnose.doctor import cni_files
from ebpfproxy.diagnose.doctor.other_proxies import kube_proxies, own_agents
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux import modules, processes
from ebpfproxy.linux.processes import Process


def write(folder: Path, name: str, content: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_lists_and_single_plugins_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path, "20-one.conf", {"name": "lo", "type": "loopback"})
    write(tmp_path, "10-list.conflist", {"name": "net", "plugins": [{"type": "calico"}, {"type": "portmap"}]})
    write(tmp_path, "00-old.conflist.bak", {"name": "old", "plugins": [{"type": "flannel"}]})
    found = cni_files.read((tmp_path,))
    assert [(each.path.name, each.network, each.types) for each in found] == [
        ("10-list.conflist", "net", ("calico", "portmap")),
        ("20-one.conf", "lo", ("loopback",)),
    ]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "3",
        '{"plugins": 3}',
        '{"plugins": [3, {}, {"type": 4}]}',
        '{"name": [], "type": {}}',
        "\0",
    ],
)
def test_a_file_that_is_no_configuration_has_no_plugins(tmp_path: Path, content: str) -> None:
    write(tmp_path, "10-x.conflist", content)
    (found,) = cni_files.read((tmp_path,))
    assert found.types == ()


def test_the_first_folder_with_files_counts(tmp_path: Path) -> None:
    empty, host, own = tmp_path / "empty", tmp_path / "host", tmp_path / "own"
    empty.mkdir()
    write(host, "10-host.conflist", {"name": "host"})
    write(own, "10-own.conflist", {"name": "own"})
    (found,) = cni_files.read((tmp_path / "missing", empty, host, own))
    assert found.network == "host"
    assert cni_files.read((empty,)) == ()


def test_the_nodes_folder_is_found_by_the_hosts_proc() -> None:
    assert Path("/host/proc/1/root/etc/cni/net.d") in cni_files.default_folders(Path("/host/proc"))


def test_a_process_is_found_with_its_arguments() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            found = {each.pid: each for each in processes.in_own_netns()}
            assert found[os.getpid()].arguments
            while found[child.pid].name != "sleep":  # before execve(2) it has this process's name
                found = {each.pid: each for each in processes.in_own_netns()}
            assert found[child.pid] == Process(child.pid, "sleep", ("sleep", "600"))
        finally:
            child.kill()


def test_processes_of_another_proc_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    assert list(processes.in_own_netns(tmp_path)) == []


@pytest.mark.parametrize(
    ("process", "is_proxy"),
    [
        (Process(1, "kube-proxy", ("/usr/local/bin/kube-proxy", "--v=2")), True),
        (Process(1, "exe", ("/opt/kube-proxy",)), True),
        (Process(1, "hyperkube", ("/hyperkube", "kube-proxy")), True),
        (Process(1, "tail", ("tail", "/var/log/kube-proxy")), False),
        (Process(1, "kube-proxy-wat", ("kube-proxy-watcher",)), False),
        (Process(1, "kworker/0:0", ()), False),
    ],
)
def test_kube_proxy_is_recognized_by_its_executable(process: Process, is_proxy: bool) -> None:
    assert bool(kube_proxies([process])) == is_proxy


@pytest.mark.parametrize(
    ("arguments", "is_agent"),
    [
        (("/usr/bin/python3", "/usr/local/bin/ebpfproxy", "run"), True),
        (("python3", "-m", "ebpfproxy", "run", "--v=1"), True),
        (("ebpfproxy", "doctor"), False),
        (("ebpfproxy", "cleanup", "run"), False),
        (("vi", "ebpfproxy"), False),
    ],
)
def test_an_agent_is_recognized_by_its_command(arguments: tuple[str, ...], is_agent: bool) -> None:
    assert bool(own_agents([Process(1, "python3", arguments)])) == is_agent


def test_a_module_that_does_not_exist_cannot_be_loaded() -> None:
    with pytest.raises(KernelError, match=r"cannot load the module ebpfproxy_missing: .+"):
        modules.load("ebpfproxy_missing")


def test_without_modprobe_the_hint_names_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="cannot start modprobe: No such file") as failure:
        modules.load("dummy")
    assert "on the node" in failure.value.hint
