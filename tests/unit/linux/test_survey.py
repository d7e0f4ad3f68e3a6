"""Which pod a process belongs to, by the name of its cgroup."""

from pathlib import Path

import pytest

from ebpfproxy.linux.netns.survey import pod_of

UID = "7d2c4a5e-12ab-4cde-8f01-0123456789ab"
SLICE = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    "line",
    [
        f"0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-1a2b.scope",
        f"0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/crio-1a2b.scope/container",
        f"0::/../../{SLICE}/cri-containerd-1a2b.scope",
        f"0::/kubepods/besteffort/pod{UID}/1a2b",
        f"0::/kubepods/pod{UID}",
        f"0::/kubelet/kubepods/burstable/pod{UID}/1a2b",
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-{SLICE}/cri-containerd-1a2b.scope",
        f"11:memory:/kubepods/besteffort/pod{UID}/1a2b\n0::/",
    ],
)
def test_containers_of_a_pod(tmp_path: Path, line: str) -> None:
    (tmp_path / "cgroup").write_text(f"{line}\n")
    assert pod_of(tmp_path) == UID


def test_a_static_pod_is_named_by_a_digest(tmp_path: Path) -> None:
    digest = "0123456789abcdef0123456789abcdef"
    (tmp_path / "cgroup").write_text(f"0::/kubepods/burstable/pod{digest}/1a2b\n")
    assert pod_of(tmp_path) == digest


@pytest.mark.parametrize(
    "line",
    [
        "0::/",
        "0::/system.slice/containerd.service",
        "0::/lxc.payload.guest/init.scope",
        "0::/docker/1a2b",
        "0::/kubepods.slice/kubepods-burstable.slice",
        f"0::/libpod/pod{UID}",
        f"0::/kubepods/besteffort/pod{UID}/1a2b/docker/3c4d",
        f"0::/kubepods/besteffort/pod{UID}/1a2b/init.scope",
    ],
)
def test_other_processes_and_what_a_container_has_started(tmp_path: Path, line: str) -> None:
    (tmp_path / "cgroup").write_text(f"{line}\n")
    assert pod_of(tmp_path) == ""


def test_an_ended_process_belongs_to_no_pod(tmp_path: Path) -> None:
    assert pod_of(tmp_path) == ""
