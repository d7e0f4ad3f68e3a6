"""Real cgroup v2 and bpffs mounts. Tests that mount do so in a process with its own mount namespace."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.linux import mounts

pytestmark = pytest.mark.kernel

PRELUDE = """
import os, subprocess, sys
from pathlib import Path
from ebpfproxy.errors import *
from ebpfproxy.linux import mounts
folder, parent = Path(sys.argv[1]), Path(sys.argv[2])
"""


def apart(script: str, folder: Path, *unshared: str) -> None:
    """Run `script` in a new mount namespace (and others, by `unshared`); its failed asserts fail the test."""
    command = ["unshare", "--mount", *unshared, sys.executable, "-c", PRELUDE + script]
    done = subprocess.run(
        [*command, str(folder), f"/proc/{os.getpid()}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """An empty cgroup below the root."""
    path = mounts.cgroup2_root() / f"ebpfproxy-test-{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()


def test_the_root_cgroup_is_distinguished_from_a_child(cgroup: Path) -> None:
    assert mounts.is_true_cgroup_root(cgroup.parent)
    assert not mounts.is_true_cgroup_root(cgroup)


def test_the_machines_cgroup_root_is_found_at_its_mount() -> None:
    root = mounts.host_cgroup2_root()
    assert root == mounts.cgroup2_root()
    assert mounts.is_true_cgroup_root(root)


def test_the_root_of_a_v1_hierarchy_is_not_accepted(tmp_path: Path) -> None:
    """It also has inode number 1."""
    apart(
        """
subprocess.run(["mount", "-t", "cgroup", "-o", "none,name=ebpfproxy-test", "none", folder], check=True)
try:
    assert folder.stat().st_ino == 1
    assert not mounts.is_true_cgroup_root(folder)
finally:
    mounts.unmount(folder)
""",
        tmp_path,
    )


def test_the_true_root_is_preferred_to_a_bind_mounted_child(cgroup: Path, tmp_path: Path) -> None:
    apart(
        f"""
subprocess.run(["mount", "--bind", {str(cgroup)!r}, folder], check=True)
assert not mounts.is_true_cgroup_root(folder)
order = folder.parent / "mounts"
order.write_text(f"cgroup2 {{folder}} cgroup2 rw 0 0\\ncgroup2 {cgroup.parent} cgroup2 rw 0 0\\n")
assert mounts.cgroup2_root(str(order)) == Path({str(cgroup.parent)!r})
""",
        tmp_path,
    )


CONTAINER = """
# Like a container runtime: a cgroup, a cgroup namespace with it as root, and only this one mounted.
cgroup = Path({cgroup!r})
(cgroup / "cgroup.procs").write_text(str(os.getpid()))
import ctypes
assert ctypes.CDLL(None).unshare(0x02000000) == 0  # CLONE_NEWCGROUP
for mount in [line.split()[1] for line in open("/proc/self/mounts") if line.split()[2] == "cgroup2"]:
    mounts.unmount(Path(mount))
subprocess.run(["mount", "-t", "cgroup2", "none", folder], check=True)
"""


def in_container(cgroup: Path, folder: Path, body: str) -> None:
    apart(CONTAINER.format(cgroup=str(cgroup)) + body, folder)


def test_an_agent_in_a_container_uses_the_hosts_root(cgroup: Path, tmp_path: Path) -> None:
    """Regression, cilium/cilium#48420: programs were attached to a bootstrap cgroup without other
    processes."""
    in_container(
        cgroup,
        tmp_path,
        """
assert mounts.cgroup2_root() == folder
assert not mounts.is_true_cgroup_root(folder)
found = mounts.host_cgroup2_root(parent)
assert str(found).startswith(f"{parent}/root/"), found
assert mounts.is_true_cgroup_root(found)
""",
    )


def test_without_host_pid_the_containers_cgroup_is_rejected(cgroup: Path, tmp_path: Path) -> None:
    """Regression, cilium/cilium#48420: without hostPID, process 1 is the container's."""
    in_container(
        cgroup,
        tmp_path,
        """
try:
    found = mounts.host_cgroup2_root(Path("/proc/self"))
except NotFound as error:
    assert str(folder) in error.message and "hostPID" in error.hint
else:
    raise AssertionError(found)
""",
    )


def test_the_root_of_an_ended_process_is_not_found(cgroup: Path, tmp_path: Path) -> None:
    in_container(
        cgroup,
        tmp_path,
        """
try:
    found = mounts.host_cgroup2_root(Path("/proc/0"))
except NotFound:
    pass
else:
    raise AssertionError(found)
""",
    )


def test_bpffs_is_mounted_once_and_directories_below_are_created(tmp_path: Path) -> None:
    apart(
        """
root = folder / "a" / "bpf"
assert mounts.ensure_bpffs(root) is True
assert mounts.is_bpffs(root) and not mounts.is_bpffs(root.parent)
assert mounts.ensure_bpffs(root) is False
assert mounts.ensure_bpffs(root / "v1" / "links") is False
assert mounts.is_bpffs(root / "v1" / "links")
mounts.unmount(root)
assert not mounts.is_bpffs(root)
try:
    mounts.unmount(root)
except NotFound:
    pass
else:
    raise AssertionError("unmounted twice")
""",
        tmp_path,
    )
    assert not mounts.is_bpffs(tmp_path / "a" / "bpf")


@pytest.mark.parametrize("shared", [True, False])
def test_is_mounted_for_another_process_depends_on_mount_propagation(tmp_path: Path, shared: bool) -> None:
    subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
    try:
        subprocess.run(["mount", "--make-shared", tmp_path], check=True)
        apart(
            f"""
root = folder / "bpf"
assert mounts.ensure_bpffs(root) is True
assert mounts.is_mounted_for(parent, root) is {shared}
""",
            tmp_path,
            *(["--propagation=unchanged"] if shared else []),
        )
    finally:
        subprocess.run(["umount", "--recursive", tmp_path], check=True)


def test_for_a_path_below_sys_fs_bpf_bpffs_is_mounted_at_sys_fs_bpf(tmp_path: Path) -> None:
    """Directories cannot be created in sysfs, so bpffs must be mounted first."""
    apart(
        """
while mounts.is_bpffs(mounts.BPFFS):
    mounts.unmount(mounts.BPFFS)
assert mounts.ensure_bpffs(mounts.BPFFS / "ebpfproxy" / "v1") is True
assert mounts.is_bpffs(mounts.BPFFS) and (mounts.BPFFS / "ebpfproxy" / "v1").is_dir()
""",
        tmp_path,
    )


def test_without_sys_admin_mounting_raises_unsupported(tmp_path: Path) -> None:
    apart(
        """
import ctypes, struct
assert ctypes.CDLL(None).capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)) == 0
try:
    mounts.ensure_bpffs(folder)
except Unsupported as error:
    assert "CAP_SYS_ADMIN" in error.hint
else:
    raise AssertionError("mounted")
""",
        tmp_path,
    )


def test_a_mount_in_use_is_not_unmounted(tmp_path: Path) -> None:
    apart(
        """
assert mounts.ensure_bpffs(folder) is True
with os.scandir(folder):
    try:
        mounts.unmount(folder)
    except Rejected as error:
        assert "busy" in error.message
    else:
        raise AssertionError("unmounted")
mounts.unmount(folder)
""",
        tmp_path,
    )


NODE_CONTAINER = """
import ctypes, time
node = folder  # a cgroup, which becomes the root of the node's cgroup namespace
def join(cgroup): (cgroup / "cgroup.procs").write_text("0")
join(node)
assert ctypes.CDLL(None).unshare(0x02000000) == 0  # CLONE_NEWCGROUP
for name in ("init.scope", "kubelet/pod/agent"):
    (node / name).mkdir(parents=True)
subprocess.run(["umount", "--recursive", "--lazy", "/sys/fs/cgroup"], check=True)
subprocess.run(["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"], check=True)  # shows `node` as its root
root = Path("/sys/fs/cgroup")
init = os.fork()
if not init:
    join(root / "init.scope")
    time.sleep(60)
    os._exit(0)
def in_a_pod(cgroup, check):
    \"\"\"Run a check in a pod's cgroup, with a cgroup namespace and mounts of its own.\"\"\"
    pid = os.fork()
    if not pid:
        try:
            join(root / cgroup)
            assert ctypes.CDLL(None).unshare(0x02000000 | 0x00020000) == 0  # and CLONE_NEWNS
            subprocess.run(["umount", "--lazy", "/sys/fs/cgroup"], check=True)
            subprocess.run(["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"], check=True)
            check()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
try:
    @@CHECKS@@
finally:
    os.kill(init, 9)
    os.waitpid(init, 0)
"""


def in_a_node_container(checks: str, cgroup: Path) -> None:
    """Run checks on a node that is a container with its own cgroup namespace, as in kind."""
    lines = checks.strip().replace("\n", "\n    ")
    try:
        apart(NODE_CONTAINER.replace("@@CHECKS@@", lines), cgroup)
    finally:
        for name in ("init.scope", "kubelet/pod/agent", "kubelet/pod", "kubelet"):
            (cgroup / name).rmdir()


def test_on_a_node_that_is_a_container_the_root_of_its_namespace_is_found(cgroup: Path) -> None:
    """Regression: --proxy-mode=ebpf ended, and auto used nftables, in kind without --cgroup-root."""
    in_a_node_container(
        f"""
def check():
    found = mounts.host_cgroup2_root(Path(f"/proc/{{init}}"))
    assert found.stat().st_ino == {cgroup.stat().st_ino}, found
    assert (found / "kubelet/pod/agent").is_dir()
assert in_a_pod("kubelet/pod/agent", check)
""",
        cgroup,
    )


def test_the_cgroup_of_a_single_container_is_not_the_root_of_the_node(cgroup: Path) -> None:
    """Without hostPID, init is the first process of the agent's own pod."""
    in_a_node_container(
        """
def check():
    try:
        found = mounts.host_cgroup2_root(Path("/proc/self"))
    except NotFound:
        return
    raise AssertionError(found)
assert in_a_pod("kubelet/pod/agent", check)
""",
        cgroup,
    )
