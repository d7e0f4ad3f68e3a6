"""The machines of vagrant/, tested without starting them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.kustomize import REPOSITORY, one, render

VAGRANT = REPOSITORY / "vagrant"
SCRIPTS = sorted((VAGRANT / "provision").glob("*.sh"))
ADDRESS = "192.168.56.10"

_VERSION = re.compile(r"\bv?\d+\.\d+\.\d+\b")


def pins() -> dict[str, str]:
    lines = (VAGRANT / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def test_shellcheck_accepts_all_scripts() -> None:
    program = str(Path(sys.executable).with_name("shellcheck"))
    scripts = map(str, [*SCRIPTS, REPOSITORY / ".ci/run"])
    command = [program, "--external-sources", "--source-path=SCRIPTDIR", *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("ruby") is None, reason="no program ruby")
def test_the_vagrantfile_is_valid_ruby() -> None:
    subprocess.run(["ruby", "-wc", VAGRANT / "Vagrantfile"], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("vagrant") is None, reason="no program vagrant")
def test_vagrant_accepts_the_vagrantfile(tmp_path: Path) -> None:
    variables = {
        "VAGRANT_CWD": str(VAGRANT),
        "VAGRANT_HOME": str(tmp_path),
        "VAGRANT_DOTFILE_PATH": str(tmp_path),
    }
    done = subprocess.run(
        ["vagrant", "validate", "--ignore-provider"],
        env=os.environ | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_versions_are_pinned_in_one_place() -> None:
    for path in [VAGRANT / "Vagrantfile", *SCRIPTS]:
        assert not _VERSION.search(path.read_text()), path
    pinned = pins()
    assert pinned["KUBERNETES_PACKAGE"].startswith(f"{pinned['KUBERNETES_VERSION']}-")
    assert pinned["KUBERNETES_VERSION"].startswith(pinned["KUBERNETES_MINOR"].removeprefix("v"))


def test_the_applied_overlay_has_the_pinned_image_and_address() -> None:
    objects = render(VAGRANT / "cluster")
    (container,) = one(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == pins()["IMAGE"]
    url = f"https://{pins()['CONTROL_ADDRESS']}:6443"
    assert one(objects, "ConfigMap")["data"]["api-server"] == url
    deployment, service = yaml.safe_load_all((VAGRANT / "web.yaml").read_text())
    (web,) = deployment["spec"]["template"]["spec"]["containers"]
    assert web["image"] == pins()["IMAGE"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_every_pin_is_used_and_every_use_is_pinned() -> None:
    used = set(re.findall(r'"([A-Z][A-Z0-9_]+)"', (VAGRANT / "Vagrantfile").read_text()))
    used |= {f"{name}_VERSION" for name in used if name.endswith("BOX")}
    for script in SCRIPTS:
        used |= set(re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", script.read_text()))
    used -= {"BASH_SOURCE", "KUBECONFIG", "VAGRANT_NO_PARALLEL"}
    assert used == pins().keys()


_STUB = r"""#!/bin/bash
# Replaces every command with effects outside the machine's files, and records its calls.
name=${0##*/}
echo "$name $*" >>/calls
for argument; do case $previous in --output) target=$argument ;; esac; previous=$argument; done
case "$name $*" in
  "containerd config default") echo "            SystemdCgroup = false" ;;
  "buildah push "*) touch /srv/handout/image.tar ;;
  "buildah build "*) test -f "$3" && test -d "${!#}/ebpfproxy" ;;
  "kubeadm init "*) touch /etc/kubernetes/admin.conf && test ! -e /fails && touch /etc/kubernetes/done ;;
  "kubeadm join "*) mkdir -p /var/lib/kubelet/pki && touch /var/lib/kubelet/pki/kubelet-client-current.pem ;;
  "kubeadm token create "*) echo "kubeadm join 192.0.2.1:6443 --token t" ;;
  "kubectl --namespace kube-public get "*) test -e /etc/kubernetes/done ;;
  "kubectl apply --kustomize "*) test -f "$3/kustomization.yaml" ;;
  "kubectl apply --filename=-") cat >/applied ;;
  "gpg "*) cat >"$target" ;;
  "curl "*/join) echo "kubeadm join 192.0.2.1:6443 --token t" >"$target" ;;
  "curl "*) printf '        args:\n        - --kube-subnet-mgr\n' >"${target-/dev/stdout}" ;;
esac
"""
_STUBBED = (
    "apt-get apt-mark buildah containerd ctr curl gpg kubeadm kubectl modprobe swapoff sysctl systemctl"
)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A separate root over this machine's files, with stubs for commands that must not run."""
    own, root = tmp_path / "own", tmp_path / "root"
    for path in (own, root):
        path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", own], check=True)
    try:
        for path in (own / "upper", own / "work"):
            path.mkdir()
        options = f"lowerdir=/,upperdir={own}/upper,workdir={own}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", root], check=True)
        stubs = root / "stubs"
        of_systemd = ("modules-load.d", "sysctl.d", "systemd/system")  # containers may not have these
        folders = [root / "etc" / name for name in ("kubernetes", *of_systemd)]
        for path in (stubs, root / "ebpfproxy", *folders):
            path.mkdir(parents=True, exist_ok=True)
        for name in _STUBBED.split():
            (stubs / name).write_text(_STUB)
            (stubs / name).chmod(0o755)
        for file, line in (
            ("passwd", "vagrant:x:4000:4000::/home/vagrant:/bin/bash"),
            ("group", "vagrant:x:4000:"),
        ):
            with open(root / "etc" / file, "a") as accounts:
                accounts.write(f"{line}\n")
        (root / "etc/fstab").write_text("UUID=1 / ext4 defaults 0 1\nUUID=2 none swap sw 0 0\n")
        yield root
    finally:
        for path in (root, own):
            subprocess.run(["umount", "--lazy", path], check=False)


def provision(machine: Path, script: Path) -> list[str]:
    """Run the script like Vagrant; the calls of stubs."""
    (machine / "calls").write_text("")
    mounts = (
        f"mount --bind {REPOSITORY} {machine}/ebpfproxy; mount --bind /dev {machine}/dev; "
        f"mount --bind /proc {machine}/proc; mount -t tmpfs tmpfs {machine}/tmp"
    )
    inside = f"/ebpfproxy/vagrant/provision/{script.name} {ADDRESS}"
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-ec", f"{mounts}; exec chroot {machine} {inside}"],
        env={"PATH": "/stubs:/usr/sbin:/usr/bin:/sbin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return re.sub(r"/tmp/tmp\.\w+", "/tmp/fetched", (machine / "calls").read_text()).splitlines()


def files(machine: Path) -> dict[str, bytes]:
    """Names and contents of the files that scripts may write."""
    own = machine.parent / "own/upper"
    return {
        str(path.relative_to(own)): path.read_bytes()
        for path in own.rglob("*")
        if path.is_file() and path.name != "calls"
    }


@pytest.mark.kernel
@pytest.mark.parametrize("script", [script.name for script in SCRIPTS])
def test_running_a_script_again_changes_nothing(machine: Path, script: str) -> None:
    path = VAGRANT / "provision" / script
    first = provision(machine, path)
    after = files(machine)
    again = provision(machine, path)
    assert files(machine) == after
    once = {call for call in first if call.startswith(("kubeadm init", "kubeadm join"))}
    assert len(once) == (0 if script == "node.sh" else 1)
    assert set(again) <= set(first) - once


@pytest.mark.kernel
def test_kubeadm_init_is_repeated_after_a_failure(machine: Path) -> None:
    script = VAGRANT / "provision/control-plane.sh"
    (machine / "fails").touch()
    with pytest.raises(AssertionError):
        provision(machine, script)
    (machine / "fails").unlink()
    begun = [call.split()[1] for call in provision(machine, script) if call.startswith("kubeadm")]
    assert begun == ["reset", "init", "token"]


@pytest.mark.kernel
def test_a_node_has_no_swap_and_the_given_address(machine: Path) -> None:
    provision(machine, VAGRANT / "provision/node.sh")
    assert "swap" not in (machine / "etc/fstab").read_text()
    assert (machine / "etc/default/kubelet").read_text() == f"KUBELET_EXTRA_ARGS=--node-ip={ADDRESS}\n"
    assert "SystemdCgroup = true" in (machine / "etc/containerd/config.toml").read_text()


@pytest.mark.kernel
def test_flannel_uses_the_cluster_networks_device(machine: Path) -> None:
    calls = provision(machine, VAGRANT / "provision/control-plane.sh")
    expression = f"^{ADDRESS.rpartition('.')[0]}.".replace(".", "[.]")
    assert (machine / "applied").read_text().splitlines()[1:] == [
        "        - --kube-subnet-mgr",
        f"        - --iface-regex={expression}",
    ]
    assert re.search(expression, ADDRESS)
    (init,) = [call for call in calls if call.startswith("kubeadm init")]
    assert "--skip-phases=addon/kube-proxy" in init
