"""A kube-proxy binary as a proxy of the lab's node, with the lab's API server as its source."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from ebpfproxy.errors import ConfigError, EbpfProxyError
from ebpfproxy.lab import Lab, api_server
from ebpfproxy.lab.agent import memory_mb

PREFIX = "kube-proxy-"
"""The name of a mode of kube-proxy in results is this and the mode."""

MODES = ("nftables", "iptables", "ipvs")

_LAST_LINES = 20
_NFTABLES_BEHIND_GATE = ("1.29", "1.30")
"""In these versions, mode nftables is alpha: NFTablesProxyMode must be enabled (KEP-3866)."""


class KubeProxyFailed(EbpfProxyError):
    """kube-proxy ended. The hint is its last log lines."""


def version(binary: Path) -> str:
    """Return the version of a kube-proxy binary, such as v1.30.5. Raises ConfigError if it is none."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"cannot run {binary} --version: {error}", "give --kube-proxy the path of a kube-proxy binary"
        ) from error
    found = re.fullmatch(r"Kubernetes (v\d+\.\d+\.\S+)\s*", done.stdout)
    if not found:
        raise ConfigError(
            f"{binary} is not kube-proxy: --version prints {done.stdout.strip()!r}",
            "give --kube-proxy the path of a kube-proxy binary",
        )
    return found[1]


def configuration(
    mode: str, node_name: str, cluster_cidr: str, kubeconfig: Path, of_version: str
) -> dict[str, Any]:
    """Return the KubeProxyConfiguration for a node of the lab.

    It syncs a change at once and compares nothing in between, as the agents of a comparison do. It does not
    change limits of connection tracking, which belong to the machine.
    """
    interval = {"minSyncPeriod": "1ms", "syncPeriod": "1h"}
    settings: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "hostnameOverride": node_name,
        "clientConnection": {"kubeconfig": str(kubeconfig), "contentType": "application/json"},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # Mode nftables of 1.30 does not support prefixes of interface names.
        "detectLocalMode": "ClusterCIDR",
        "clusterCIDR": cluster_cidr,
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "oomScoreAdj": 0,
        "iptables": interval,
        "ipvs": interval,
        "nftables": interval,
    }
    if mode == "nftables" and of_version.removeprefix("v").startswith(
        tuple(f"{each}." for each in _NFTABLES_BEHIND_GATE)
    ):
        settings["featureGates"] = {"NFTablesProxyMode": True}
    return settings


class KubeProxy:
    """The process of kube-proxy on the first node of a lab whose API server runs.

    `started` is its start, in seconds of time.monotonic().
    """

    def __init__(self, lab: Lab, binary: Path, mode: str) -> None:
        """Start it in one of MODES. Raises ConfigError if the binary is not kube-proxy."""
        kubeconfig, file = lab.folder / "kubeconfig.json", lab.folder / "kube-proxy.json"
        kubeconfig.write_text(json.dumps(_kubeconfig()))
        cidrs = ",".join(lab.addresses.all_pods)
        settings = configuration(mode, lab.node_name, cidrs, kubeconfig, version(binary))
        file.write_text(json.dumps(settings))
        self._log = lab.folder / "kube-proxy.log"
        with open(self._log, "wb") as log:
            self.started = time.monotonic()
            self.process: subprocess.Popen[bytes] = lab.node.popen(
                [binary, f"--config={file}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def check(self) -> None:
        """Raise KubeProxyFailed if it has ended."""
        status = self.process.poll()
        if status is not None:
            lines = self._log.read_text(errors="replace").splitlines()
            raise KubeProxyFailed(f"kube-proxy ended with status {status}", "\n".join(lines[-_LAST_LINES:]))

    def rss_mb(self) -> float:
        """Return the resident memory, in MB of 10^6 bytes."""
        return memory_mb(self.process.pid, "VmRSS")


def _kubeconfig() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": api_server.URL}}],
        "users": [{"name": "lab", "user": {}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
    }
