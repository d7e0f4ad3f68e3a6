"""The agent with a configuration file that changes at run time."""

from pathlib import Path

import pytest

from ebpfproxy.agent.mode_switch import SWITCHED
from tests.kernel.cluster import Cluster

pytestmark = pytest.mark.kernel

SECTIONS = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
iptables: {masqueradeBit: 14}
nftables: {masqueradeBit: 20}
"""


def configure(path: Path, mode: str) -> None:
    written = path.with_suffix(".new")
    written.write_text(f"{SECTIONS}mode: {mode}\n")
    written.rename(path)


def test_a_mode_switch_uses_the_new_modes_configuration_section(restartable: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "config.conf"
    configure(path, "iptables")
    agent = restartable.start(f"--config={path}")
    assert "--set-xmark 0x4000/0x4000" in restartable.node.run(["iptables-save"]).stdout
    configure(path, "nftables")
    agent.await_line(lambda line: f" {SWITCHED} mode=nftables " in line.text)
    assert (
        "0x00100000"
        in restartable.node.run(["nft", "list", "chain", "ip", "kube-proxy", "mark-for-masquerade"]).stdout
    )
    assert not any("next start" in line.text for line in agent.lines)
